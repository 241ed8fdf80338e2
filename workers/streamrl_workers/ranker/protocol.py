"""Frames between the scheduler and the ranker's process, as `tasks/framing.py` carries them.

    to the process      Opening, once; then {"score": [[key, prompt], ..]} and {"learn": [[prompt, tokens], ..]}
    to the scheduler    {"ready": numbers} or {"user_error": {..}}, once; then {"scores": [[key, score], ..], "numbers": {..}}

Each `score` gets one answer, with every key of it; a score that is no finite number is null. `scores` is empty where only numbers are new.
Numbers: `rounds` of tuning that are done, `pairs` remembered, `cpu_s` used by the process since it began. Owns the names and their checks.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from streamrl.errors import UserError

MODULE = "streamrl_workers.ranker"
"""What the scheduler starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the process is to be."""

    ranker: str
    """Key of the contract's union."""
    path: str
    """Folder that `streamrl rank fit` wrote."""
    field: str
    """Names the path in errors."""
    state_dir: str
    """Folder of this process in the run's; made by it."""
    cpu_percent: float = 0.0
    """Of one core, for tuning; 0: never tuned."""
    refit_pairs: int = 0
    """New pairs that begin a round of tuning."""

    def frame(self) -> dict[str, Any]:
        """As it is sent."""
        return asdict(self)

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> "Opening":
        """As it was sent."""
        return cls(**{field.name: frame[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNumbers:
    """What the process tells of itself."""

    rounds: int = 0
    """Rounds of tuning, those of earlier processes of the run included."""
    pairs: int = 0
    """Remembered."""
    cpu_s: float = 0.0
    """User and system time of this process."""


def to_score(prompts: Iterable[tuple[int, str]]) -> dict[str, Any]:
    """Score these (key, prompt)."""
    return {"score": list(prompts)}


def to_learn(pairs: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Completions of these prompts had so many tokens on average."""
    return {"learn": list(pairs)}


def ready(numbers: ProcessNumbers) -> dict[str, Any]:
    """The model is there."""
    return {"ready": asdict(numbers)}


def refusal(error: UserError) -> dict[str, Any]:
    """The folder cannot be used."""
    got = error.got if isinstance(error.got, str | int | float | None) else repr(error.got)
    return {"user_error": {"field": error.field, "rule": error.rule, "got": got, "fix": error.fix}}


def answer(keys: Sequence[int], scores: Sequence[float], *, numbers: ProcessNumbers) -> dict[str, Any]:
    """Scores of one request, and what is new."""
    finite = [score if math.isfinite(score) else None for score in scores]
    return {"scores": list(zip(keys, finite, strict=True)), "numbers": asdict(numbers)}


def scores_of(frame: Mapping[str, Any]) -> dict[int, float]:
    """Key -> score of an answer, those that are numbers."""
    return {int(key): float(score) for key, score in frame["scores"] if score is not None}


def numbers_of(frame: Mapping[str, Any]) -> ProcessNumbers:
    """Of an answer, or of `ready`."""
    given = frame.get("ready") or frame["numbers"]
    return ProcessNumbers(**{field.name: given[field.name] for field in fields(ProcessNumbers)})
