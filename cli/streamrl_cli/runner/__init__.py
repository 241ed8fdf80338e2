"""The local runner: an RLJob as processes of this machine. Never imports torch.

plan.py (pure)  ->  supervisor.py, unit.py, workers.py (start, watch, restart)  ->  progress.py + view.py (for the eyes)
                                      ^ scaling.py (how many generators)
"""
