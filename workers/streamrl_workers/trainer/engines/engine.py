"""What the step loop asks of an engine. Imports no torch.

Invariants that every engine keeps:
- Calls are synchronous and come from one thread.
- Parameters change in `finish_step` and `load` only; a step that was begun can be discarded at any time before.
- What a step computes depends on its groups, not on how they were cut into calls of `add` and `advance`
  (up to floating-point rounding).
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypedDict

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.hashing import SliceBytes, TensorBytes

Kept = tuple[int, int]
"""Attempt and step of a version that can still be pulled."""


class FileHash(TypedDict):
    """What `meta.json` says of a file."""

    size_bytes: int
    hash: str  # "algorithm:digest"


FileHashes = dict[str, FileHash]
"""By path in the checkpoint."""


class RetryError(Exception):
    """This process cannot go on, a new one can: exit code 75. The text says why."""


class RankLostError(RetryError):
    """Another rank is gone, and its own process says why: exit code 76 where that is in another pod, else 75."""


class TrainEngine(Protocol):
    """Trains one model, one step at a time."""

    def begin_step(self, step: int, *, attempt: int, cuts: pb.PassCuts | None = None) -> None:
        """Start step `step` (version `step` becomes `step + 1`); whatever an unfinished step had gathered is forgotten.

        `cuts`: of the step that is repeated, so that it gives the same bits; None: it is a new one.
        """

    def add(self, groups: Sequence[pb.Group]) -> None:
        """Take groups of the step that was begun."""

    def advance(self, *, idle: bool) -> bool:
        """Do one micro-step if enough samples wait (less is enough when `idle`); False: too little waits."""

    def finish_step(self) -> dict[str, float]:
        """Work off what still waits, step the optimiser once, and return the step's metrics."""

    def throughput(self) -> dict[str, float]:
        """Return how well the step that has been finished used its devices, in measured times; nothing where nothing is computed."""

    def held_out_loss(self, samples: Sequence[pb.Sample]) -> float:
        """Mean cross-entropy over the tokens of these, in nats; not while a step gathers."""

    def advantages(self, group_ids: Sequence[int]) -> bytes:
        """Of the samples of the step that has been finished, as `StepDone` has them; empty: this engine forms none."""

    def cuts(self) -> pb.PassCuts:
        """Return how the passes of the step that has been finished were cut to the memory."""

    def states(self) -> Sequence[pb.TurnState]:
        """For later steps, behind the one that has been finished, as `StepDone` has them."""

    def slices(self, *, attempt: int, step: int, kept: Sequence[Kept] = ()) -> Sequence[SliceBytes]:
        """Copy what this rank holds of the weights as they are now, tied tensors once. The other ranks copy, keep and serve theirs.

        Args:
            attempt: of the version.
            step: of the version.
            kept: older versions that the other ranks keep as well.
        """

    def probe(self) -> dict[str, TensorBytes]:
        """Return what proves the first load of these weights in an engine (`models/probe.py`); nothing where no engine computes with them."""

    def save(self, directory: Path) -> "Future[FileHashes]":
        """Copy everything that training continues from; training may go on while it is written into the existing, empty `directory`.

        The Future has the hashes of the files that were hashed as they were written; others may be there too. It raises OSError: a disk is full.
        """

    def load(self, directory: Path) -> None:
        """Go back to what `save` wrote. A checkpoint of another model is the user's error."""

    def export(self, directory: Path) -> None:
        """Write the trained model in the form that its users load into the existing, empty `directory`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """One of `size` ranks, as torchrun's environment variables say it; rank 0 is the one that speaks with the scheduler."""

    rank: int = 0
    local_rank: int = 0  # which GPU of this node
    size: int = 1
    host: str = ""  # of rank 0's rendezvous; "" if there is one rank
    port: int = 0

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return self.size == 1
