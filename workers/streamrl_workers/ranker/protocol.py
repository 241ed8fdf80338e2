"""Frames between the scheduler and the ranker's process, as `process/framing.py` carries them.

    to the process      Opening, once; then {"score": [[key, prompt], ..]} or {"learn": [[prompt, tokens], ..]}
    to the scheduler    {"status": {..}} or {"user_error": {..}}, once; then for each frame {"scores": [[key, score], ..], "status": {..}}

A score that is no finite number is null. Owns the names and their checks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from streamrl.errors import UserError

MODULE = "streamrl_workers.ranker"
"""What the scheduler starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the process is to be."""

    path: str
    """Folder of the language model that `streamrl ranker fit` wrote; empty: the ranker `hashing`."""
    field: str
    """Names the path in errors."""
    state_dir: str
    """Folder of this process in the run's; made by it."""
    cpu_percent: float = 0.0
    """Of one core, for tuning; 0: never tuned."""
    refit_pairs: int = 0
    """New pairs that begin a round of tuning."""

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> "Opening":
        """As it was sent (`asdict`)."""
        return cls(**{field.name: frame[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What the process tells of itself."""

    rounds: int = 0
    """Rounds of tuning, those of earlier processes of the run included."""
    pairs: int = 0
    """Remembered."""
    cpu_s: float = 0.0
    """User and system time of this process."""

    @classmethod
    def of(cls, frame: Mapping[str, Any]) -> "ProcessStatus":
        """Of an answer."""
        return cls(**{field.name: frame["status"][field.name] for field in fields(cls)})


def refusal(error: UserError) -> dict[str, Any]:
    """The folder cannot be used."""
    return {"user_error": error.parts}


def answer(keys: Sequence[int], scores: Sequence[float], *, status: ProcessStatus) -> dict[str, Any]:
    """To one frame."""
    finite = [score if math.isfinite(score) else None for score in scores]
    return {"scores": list(zip(keys, finite, strict=True)), "status": asdict(status)}


def scores_of(frame: Mapping[str, Any]) -> dict[int, float]:
    """Key -> score of an answer, those that are numbers."""
    return {int(key): float(score) for key, score in frame["scores"] if score is not None}
