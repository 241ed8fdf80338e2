"""The local runner: an RLJob as processes of this machine. Never imports torch.

plan.py (pure)  ->  supervisor.py (starts, watches, restarts)  ->  progress.py + view.py (for the eyes)
"""
