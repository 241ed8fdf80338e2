"""Dispatch, measured: the scheduler's core in virtual time over modelled engines.

    world.py      one run: the real core, engines, a trainer       draws.py    lengths, and what is predicted of them
    models.py     the paper's three models and their slots         scenarios.py   random scenarios

`benchmarks/dispatch_makespan.py` and `benchmarks/dispatch_campaign.py` are the commands.
"""
