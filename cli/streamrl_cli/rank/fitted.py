"""What every ranker that is fitted on pairs at hand takes and gives."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamrl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """What `rank fit` was told."""

    model: str = ""
    """Directory or hub name of a transformers model."""
    passes: int | None = None
    learning_rate: float | None = None
    batch_prompts: int = 16
    seed: int = 0


class Fitted(Protocol):
    """A ranker that has learnt."""

    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Higher = longer."""

    def save(self, path: Path) -> None:
        """Write what `open_fitted` reads."""


def made_folder(path: Path) -> Path:
    """The folder of a ranker with a model, made if it is not there. Raises `UserError` where a file is."""
    if path.is_file():
        raise UserError(field="--out", rule="must be a folder for this ranker", got=str(path))
    path.mkdir(parents=True, exist_ok=True)
    return path
