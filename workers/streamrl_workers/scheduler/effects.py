"""What the core asks for: effects, and the outbox that collects those of one event.

The core (`core.py`) takes events and returns a list of effects; `server/executor.py` carries them out in order.
Messages to generators and the trainer are the protocol's own, requests to the task pool the pool's (`tasks/values.py`).

Owns the order of effects: what is said as it happened; issues and cancels of one generator are gathered, one
`CancelBatch` and then `IssueBatch`es by bytes, at the end, and behind them why there is no more. Owns the numbering of
records and what is to happen once one is durable.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.records import Record
from streamrl_workers.stream.packing import batches
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, ScoreSample


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRanker:
    """For the ranker's process. The shell answers `core.prompts_ranked(scores)`, in any portions, or never."""

    prompts: tuple[tuple[int, str], ...]
    """To score: (prompt key, text)."""
    pairs: tuple[tuple[str, float], ...]
    """To learn: (text, mean completion tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToGenerator:
    """Send a command to one generator."""

    generator_id: str
    command: pb.GeneratorCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class ToTrainer:
    """Send a command to the trainer."""

    command: pb.TrainerCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverGroup:
    """Send a finished group to the trainer (a `TrainerCommand` with a `Group`). Its samples stay serialized."""

    group_id: int
    step: int
    trajectories: tuple[bytes, ...]
    """Serialized `Sample`, by sample index. Empty: the group was delivered before, the executor takes them from the journal."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Append to the journal. The executor answers `core.committed(sequence)` when it is durable; sequences rise by 1."""

    sequence: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The run is over: stop everybody, write the result, exit 0."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The run cannot go on (every group is dropped, or checkpoint and journal do not fit): stop everybody, say `reason` on one line, exit 2."""

    reason: str


Effect = (
    NeedPrompts
    | AskRanker
    | ScoreSample
    | PlayTurn
    | ToGenerator
    | ToTrainer
    | DeliverGroup
    | Write
    | Finished
    | Failed
)


Callback = Callable[[], None]


class Outbox:
    """Collects until `take`."""

    def __init__(self) -> None:
        self._effects: list[Effect] = []
        self._issues: dict[str, list[pb.SampleRequest]] = {}
        self._cancels: dict[str, list[int]] = {}
        self._idle: dict[str, str] = {}
        self._sequence = 0
        self._waiting: deque[tuple[int, Callback]] = deque()
        self._durable = 0

    def add(self, effect: Effect) -> None:
        """Any effect."""
        self._effects.append(effect)

    def to_generator(self, generator_id: str, command: pb.GeneratorCommand) -> None:
        """A command to one generator."""
        self._effects.append(ToGenerator(generator_id=generator_id, command=command))

    def to_trainer(self, command: pb.TrainerCommand) -> None:
        """A command to the trainer."""
        self._effects.append(ToTrainer(command=command))

    def issue(self, generator_id: str, request: pb.SampleRequest) -> None:
        """A sample for one generator."""
        self._issues.setdefault(generator_id, []).append(request)

    def cancel(self, generator_id: str, lease: int) -> None:
        """Take a sample from a generator."""
        self._cancels.setdefault(generator_id, []).append(lease)

    def idle(self, generator_id: str, cause: str) -> None:
        """Why a generator gets nothing more. It is told behind what it gets: an issue takes an earlier cause back."""
        self._idle[generator_id] = cause

    def forget(self, generator_id: str) -> None:
        """The generator is gone: nothing more for it."""
        self._idle.pop(generator_id, None)
        self._cancels.pop(generator_id, None)
        self._issues.pop(generator_id, None)

    def write(self, record: Record, *, then: Callback | None = None) -> None:
        """Append to the journal; `then` runs once it is durable."""
        self._sequence += 1
        self._effects.append(Write(sequence=self._sequence, record=record))
        if then is not None:
            self._waiting.append((self._sequence, then))

    def when_all_durable(self, then: Callback) -> None:
        """Run `then` when every record so far is durable: at once if there is none to wait for."""
        if self._durable == self._sequence:
            then()
        else:
            self._waiting.append((self._sequence, then))

    def committed(self, sequence: int) -> None:
        """Records up to `sequence` are durable."""
        self._durable = max(self._durable, sequence)
        while self._waiting and self._waiting[0][0] <= self._durable:
            self._waiting.popleft()[1]()

    def take(self) -> list[Effect]:
        """Everything since the last call."""
        effects = self._effects
        for name, leases in self._cancels.items():
            effects.append(_told(name, cancel=pb.CancelBatch(leases=leases)))
        for name, requests in self._issues.items():
            for items in batches(requests, size_bytes=pb.SampleRequest.ByteSize):
                command = pb.GeneratorCommand()
                command.issue.items.extend(items)  # where they are: a batch of its own would be copied once more
                effects.append(ToGenerator(generator_id=name, command=command))
        for name, cause in self._idle.items():
            effects.append(_told(name, idle=pb.Idle(cause=cause)))
        self._effects, self._issues, self._cancels, self._idle = [], {}, {}, {}
        return effects


def _told(generator_id: str, **command: Any) -> ToGenerator:  # noqa: ANN401 - one field of the command
    return ToGenerator(generator_id=generator_id, command=pb.GeneratorCommand(**command))
