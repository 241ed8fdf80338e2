"""Member clusters: which there are (`registry.py`), and the operator's work in one of them (`member.py`)."""
