"""What a dispatch policy sees and answers."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A planned group that begins to wait."""

    group_id: int
    wave: int
    """Which batch of B groups it was planned in: group_id // B."""
    predicted_tokens: float
    """Of one completion; 0 if nothing is known."""


Key = tuple[float, ...]
Policy = Callable[[Candidate], Key]
