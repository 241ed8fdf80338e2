"""Rankers by registry: what the signal `Ranker` of length prediction can be.

    hashing    a linear model on hashed features of the text, learns while the run goes on
    scores     a table that `streamrl rank score` has made with any ranker, also a large one
    languageModel, policyFeatures    models of transformers in a process of their own (`streamrl_workers/ranker`)

A creator takes the state of a file (`files.py` reads it; None: no file) and imports nothing heavy: what it makes lives in the scheduler's
process. Of rankers with a folder that is only what their process has answered.
"""

from collections.abc import Callable, Mapping
from typing import Any

from streamrl_workers.scheduler.lengths.rankers.answered import AnsweredRanker
from streamrl_workers.scheduler.lengths.rankers.deferred import DeferredRanker
from streamrl_workers.scheduler.lengths.rankers.hashing import HashingRanker
from streamrl_workers.scheduler.lengths.rankers.protocol import Ranker
from streamrl_workers.scheduler.lengths.rankers.scores import ScoresRanker

State = Mapping[str, Any]
"""What a ranker keeps, as JSON has it."""

RANKERS: dict[str, Callable[[State | None], Ranker]] = {
    "hashing": HashingRanker.from_state,
    "scores": ScoresRanker.from_state,
    "languageModel": AnsweredRanker.from_state,
    "policyFeatures": AnsweredRanker.from_state,
}


def make_ranker(key: str, state: State | None = None) -> Ranker:
    """The ranker of this key. Raises `ValueError` for an unknown key, or a state that is not its own."""
    create = RANKERS.get(key)
    if create is None:
        raise ValueError(f"unknown ranker {key!r}; known: {', '.join(RANKERS)}")
    return create(state)


__all__ = [
    "RANKERS",
    "AnsweredRanker",
    "DeferredRanker",
    "HashingRanker",
    "Ranker",
    "ScoresRanker",
    "State",
    "make_ranker",
]
