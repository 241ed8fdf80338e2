"""The trainer engine that only takes time, for kill tests and scale. Imports no torch, no numpy.

Owns: how long a step takes, the bytes that stand for weights. Weights of version v are a function of (seed, v) alone,
so that a restarted trainer publishes the same bytes. Time goes by through the injected `sleep`.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.training import SimulatedTrainer
from streamrl_workers.stream.packing import count_32
from streamrl_workers.trainer.engines.engine import FileHashes, Kept
from streamrl_workers.trainer.engines.step_metrics import StepMetrics
from streamrl_workers.weights.hashing import SliceBytes, TensorBytes, as_slices

_STATE_FILE = "simulated.json"
_TENSOR = "weights"
_LEAST_OWN_BYTES = 16
"""Of a version: no two are the same."""


class SimulatedTrainEngine:
    """Sleeps for tokens and steps."""

    def __init__(self, *, spec: SimulatedTrainer, seed: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._spec = spec
        self._seed = seed
        self._sleep = sleep
        self._version = 0
        self._waiting_tokens = 0
        self._metrics = StepMetrics(step=0)

    def begin_step(self, step: int, *, attempt: int, cuts: pb.PassCuts | None = None) -> None:
        """Begin; attempt and cuts change nothing here."""
        del attempt, cuts
        self._waiting_tokens = 0
        self._metrics = StepMetrics(step=step)

    def add(self, groups: Sequence[pb.Group]) -> None:
        """Count them."""
        for group in groups:
            self._metrics.add(group)
            self._waiting_tokens += sum(count_32(sample.tokens) for sample in group.samples)

    def advance(self, *, idle: bool) -> bool:
        """Take the time of the tokens that wait, however few."""
        del idle
        if not self._waiting_tokens:
            return False
        self._pass(self._waiting_tokens * self._spec.seconds_per_token)
        self._waiting_tokens = 0
        return True

    def finish_step(self) -> dict[str, float]:
        """Take the time of a step."""
        self.advance(idle=True)
        self._pass(self._spec.seconds_per_step)
        self._version = self._metrics.step + 1
        return self._metrics.metrics() | {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 0.0}

    def throughput(self) -> dict[str, float]:
        """Nothing is computed."""
        return {}

    def held_out_loss(self, samples: Sequence[pb.Sample]) -> float:
        """Nothing is learned."""
        del samples
        return 0.0

    def advantages(self, group_ids: Sequence[int]) -> bytes:
        """None: there is no algorithm."""
        del group_ids
        return b""

    def cuts(self) -> pb.PassCuts:
        """None: there are no passes."""
        return pb.PassCuts()

    def states(self) -> Sequence[pb.TurnState]:
        """None: there is no algorithm."""
        return ()

    def slices(self, *, attempt: int, step: int, kept: Sequence[Kept] = ()) -> Sequence[SliceBytes]:
        """Return the tensors, each as one slice."""
        del attempt, step, kept
        return list(as_slices(self.tensors()))

    def tensors(self) -> dict[str, TensorBytes]:
        """Bytes that differ for each (seed, version): few of them, as those of a model do."""
        size = self._spec.weight_bytes
        own = random.Random(f"{self._seed}/{self._version}").randbytes(min(size, max(_LEAST_OWN_BYTES, size // 50)))
        data = own + random.Random(self._seed).randbytes(size - len(own))
        return {_TENSOR: TensorBytes("uint8", (len(data),), memoryview(data))}

    def probe(self) -> dict[str, TensorBytes]:
        """Nothing: there is no model."""
        return {}

    def save(self, directory: Path) -> "Future[FileHashes]":
        """A small file, written at once."""
        self.export(directory)
        saved: Future[FileHashes] = Future()
        saved.set_result({})
        return saved

    def load(self, directory: Path) -> None:
        """Read it back."""
        try:
            state = json.loads((directory / _STATE_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                field=str(directory),
                rule="is not a checkpoint of the simulated engine",
                fix="resume with the engine that wrote it",
            ) from None
        self._version = state["version"]

    def export(self, directory: Path) -> None:
        """The same small file: there is no model."""
        (directory / _STATE_FILE).write_text(
            json.dumps({"seed": self._seed, "version": self._version}), encoding="utf-8"
        )

    def _pass(self, seconds: float) -> None:
        if seconds > 0:
            self._sleep(seconds)
