"""One look at everything a scratch model will be warmed up on, before the first step.

Owns which items those are (the first ones of the training split) and two facts about them: their characters, which
become the vocabulary, and a digest of their texts, which covers data set, parameters, seed and the user's format
function at once. Reads the data set twice (here and in the warm-up) rather than holding it in memory.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from streamrl.errors import UserError
from streamrl.spec.model import WarmUp
from streamrl_workers.models.warm_up import Pair
from streamrl_workers.tasks.dataset import TaskDataset

_MIN_TRAIN_ITEMS = 4096
"""Items looked at however short the warm-up is: a character that none of them has cannot be written or read later."""

_HELD_OUT_ITEMS = 512
"""Held-out items looked at, for their characters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was seen."""

    characters: frozenset[str]
    digest: str
    """SHA-256 of the pairs that the warm-up reads, in order."""


def warm_up_pairs(dataset: TaskDataset, *, spec: WarmUp) -> Iterator[Pair]:
    """The pairs of the warm-up, in order: as many as it reads."""
    return _train_pairs(dataset, count=spec.steps * spec.batch_size)


def take_survey(dataset: TaskDataset, *, spec: WarmUp) -> Survey:
    """Look at all of them. Raises `UserError` if one has no target to imitate."""
    characters: set[str] = set()
    digest = hashlib.sha256()
    for index, pair in enumerate(_train_pairs(dataset, count=max(_MIN_TRAIN_ITEMS, spec.steps * spec.batch_size))):
        if not pair.target and spec.steps > 0:
            raise _no_target(index=index, prompt=pair.prompt)
        characters.update(pair.prompt, pair.target)
        digest.update(f"{len(pair.prompt)},{len(pair.target)}:{pair.prompt}{pair.target}".encode())
    for index in range(min(_HELD_OUT_ITEMS, dataset.held_out_size or _HELD_OUT_ITEMS)):
        item = dataset.item("held_out", index)
        characters.update(item.prompt, item.target)
    return Survey(characters=frozenset(characters), digest=digest.hexdigest())


def _train_pairs(dataset: TaskDataset, *, count: int) -> Iterator[Pair]:
    for index in range(count):
        item = dataset.item("train", index)
        yield Pair(prompt=item.prompt, target=item.target)


def _no_target(*, index: int, prompt: str) -> UserError:
    return UserError(
        field="spec.model.scratch.warmUp",
        rule=f"needs a text to imitate for every item, and training item {index} has none",
        got=prompt,
        fix="give spec.task.format a function that returns a target, or set warmUp.steps to 0",
    )
