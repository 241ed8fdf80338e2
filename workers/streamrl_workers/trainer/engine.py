"""What the step loop asks of an engine.

Owns: the `TrainEngine` protocol. Does not own: any engine, the scheduler's link, checkpoints on disk. Imports no torch.

Invariants that every engine keeps:
- Calls are synchronous and come from one thread.
- Parameters change in `finish_step` and `load` only; a step that was begun can be discarded at any time before.
- What a step computes depends on its groups, not on how they were cut into calls of `add` and `advance`
  (up to floating-point rounding).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import TensorBytes


class TrainEngine(Protocol):
    """Trains one model, one step at a time."""

    def begin_step(self, step: int, *, attempt: int) -> None:
        """Start step `step` (version `step` becomes `step + 1`); whatever an unfinished step had gathered is forgotten."""

    def add(self, groups: Sequence[pb.Group]) -> None:
        """Take groups of the step that was begun."""

    def advance(self, *, idle: bool) -> bool:
        """Do one micro-step if enough samples wait (less is enough when `idle`); False: too little waits."""

    def finish_step(self) -> dict[str, float]:
        """Work off what still waits, step the optimiser once, and return the step's metrics."""

    def tensors(self) -> dict[str, TensorBytes]:
        """A copy of the weights as they are now, by name, tied tensors once."""

    def save(self, directory: Path) -> None:
        """Write everything that training goes on from into the existing, empty `directory`."""

    def load(self, directory: Path) -> None:
        """Go back to what `save` wrote. A checkpoint of another model is the user's error."""

    def export(self, directory: Path) -> None:
        """Write the trained model in the form that its users load into the existing, empty `directory`."""
