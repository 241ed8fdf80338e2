"""The seam between rank 0, which decides, and all ranks, which compute in lockstep.

Owns: the `Ranks` protocol and the ranks of a run with one process. Does not own: what is computed (`worker.py`), processes
and links (`linked_ranks.py`), collectives (torch.distributed). Imports no torch.

    step loop ─▶ TorchEngine (rank 0: groups, advantages, micro-batches) ─▶ RANKS ─▶ RankWorker on every rank (model, gradients)

Invariants:
- Every call reaches every rank, in the same order; each gets its own payload. A rank without a sample gets an empty
  payload and runs a masked dummy: unequal numbers of forward passes would leave a rank stuck in a collective.
- A rank that dies, hangs beyond `trainer.rankTimeoutSeconds`, or raises ends the call with an error that names it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

Payload = Any
"""None, bool, int, float, str, bytes, `array`, lists and string-keyed dicts of these, and the dataclasses of `packing.py`."""


class Ranks(Protocol):
    """All ranks of the trainer, as rank 0 sees them."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call `RankWorker.<method>(payload)` on every rank, each with its own payload; the answers by rank.

        Raises:
            RetryError: a rank is gone or late; the trainer is to begin again at its checkpoint.
            UserError, OSError: what a rank raised of these (the first by rank).
        """


class OneRank:
    """The only rank is this process."""

    size = 1

    def __init__(self, worker: object) -> None:
        self._worker = worker

    def call(self, method: str, payloads: Sequence[Payload]) -> list[Payload]:
        """Call it here."""
        (payload,) = payloads
        return [getattr(self._worker, method)(payload)]


def everywhere(ranks: Ranks, method: str, payload: Payload = None) -> list[Payload]:
    """The same call with the same payload on every rank."""
    return ranks.call(method, [payload] * ranks.size)
