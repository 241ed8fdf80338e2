"""Rebalancing of a running tail: long samples go on, with their tokens, on an emptier generator when that pays.

    decision.py     which samples of one generator go to another, by the model
    remaining.py    how many tokens a running sample still has, as far as that is known
    rebalancer.py   when that is asked, about whom, and what follows from a yes

An option of the job, off by default (`docs/rebalancing.md`).
"""

from streamrl_workers.scheduler.rebalancing.decision import Host, Move, Running, best_move
from streamrl_workers.scheduler.rebalancing.rebalancer import Rebalancer
from streamrl_workers.scheduler.rebalancing.remaining import Remaining

__all__ = ["Host", "Move", "Rebalancer", "Remaining", "Running", "best_move"]
