"""The trainer engine with torch, as the step loop sees it: lives on rank 0 and tells all ranks what to compute.

Owns: which flow a rule takes, the step's tally, the step's metrics. Does not own: models and gradients (`worker.py`), how the
ranks are reached (`ranks.py`), the order of a step's work (`group_flow.py`, `batch_flow.py`), the loss (`algorithms/`).

    step loop ─▶ TORCH ENGINE ─▶ flow (samples, rounds, updates) ─▶ Ranks ─▶ RankWorker on every rank
"""

from collections.abc import Sequence
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.algorithms.rule import BatchRule, GroupRule, Rule
from streamrl_workers.trainer.engines import sums
from streamrl_workers.trainer.engines.batch_flow import BatchFlow
from streamrl_workers.trainer.engines.flow import Flow
from streamrl_workers.trainer.engines.group_flow import GroupFlow
from streamrl_workers.trainer.engines.ranks import Ranks, everywhere
from streamrl_workers.trainer.tally import Tally
from streamrl_workers.weights.hashing import TensorBytes


class TorchEngine:
    """Trains a causal language model."""

    def __init__(self, ranks: Ranks, *, spec: RLJobSpec, algorithm: Rule) -> None:
        self._ranks = ranks
        self._flow = _flow_of(algorithm, ranks=ranks, spec=spec)
        self._tally = Tally(step=0)

    def begin_step(self, step: int, *, attempt: int) -> None:
        """Begin with gradients and sums of zero."""
        self._tally = Tally(step=step)
        self._flow.begin(step, attempt=attempt)
        everywhere(self._ranks, "begin")

    def add(self, groups: Sequence[pb.Group]) -> None:
        """Count groups; their samples wait for a micro-step."""
        for group in groups:
            self._tally.add(group)
            self._flow.add(group)

    def advance(self, *, idle: bool) -> bool:
        """One micro-step on every rank."""
        return self._flow.advance(idle=idle)

    def finish_step(self) -> dict[str, float]:
        """The rest of the work, and the updates."""
        numbers = self._flow.finish(self._tally)
        measured = sums.metrics(everywhere(self._ranks, "measured"), updates=int(numbers["updates"]))
        return self._tally.metrics() | measured | numbers

    def tensors(self) -> dict[str, TensorBytes]:
        """Copies of all tensors; where names share one storage (tied embeddings), the first name stands for both."""
        tensors: dict[str, TensorBytes] = everywhere(self._ranks, "tensors")[0]
        return tensors

    def save(self, directory: Path) -> None:
        """Models, optimisers, random state."""
        everywhere(self._ranks, "save", str(directory))

    def load(self, directory: Path) -> None:
        """Go back to what was saved."""
        everywhere(self._ranks, "load", str(directory))

    def export(self, directory: Path) -> None:
        """As `from_pretrained` loads it."""
        everywhere(self._ranks, "export", str(directory))


def _flow_of(rule: Rule, *, ranks: Ranks, spec: RLJobSpec) -> Flow:
    if isinstance(rule, BatchRule):
        return BatchFlow(rule, ranks=ranks, spec=spec)
    assert isinstance(rule, GroupRule), f"{type(rule).__name__} is neither a rule of groups nor of batches"
    return GroupFlow(rule, ranks=ranks, spec=spec)
