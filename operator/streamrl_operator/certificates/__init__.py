"""The certificates of a job: what is due (`plan.py`, pure), how they are made and read (`issue.py`), as Secrets (`vault.py`)."""
