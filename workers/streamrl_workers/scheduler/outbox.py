"""The effects of one event, collected, and the records that wait to be durable.

Owns the order of effects: what is said as it happened; issues and cancels of one generator are
gathered, one `CancelBatch` and then one `IssueBatch` each, at the end, and behind them why there is no more. Owns the numbering of records
and what is to happen once one is durable.
"""

from collections import deque
from collections.abc import Callable, Iterable

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import Effect, Record, ToGenerator, ToTrainer, Write

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
        effects.extend(_cancel_commands(self._cancels.items()))
        effects.extend(_issue_commands(self._issues.items()))
        effects.extend(_idle_commands(self._idle.items()))
        self._effects, self._issues, self._cancels, self._idle = [], {}, {}, {}
        return effects


def _cancel_commands(cancels: Iterable[tuple[str, list[int]]]) -> list[Effect]:
    return [
        ToGenerator(generator_id=name, command=pb.GeneratorCommand(cancel=pb.CancelBatch(leases=leases)))
        for name, leases in cancels
    ]


def _issue_commands(issues: Iterable[tuple[str, list[pb.SampleRequest]]]) -> list[Effect]:
    return [
        ToGenerator(generator_id=name, command=pb.GeneratorCommand(issue=pb.IssueBatch(items=items)))
        for name, items in issues
    ]


def _idle_commands(causes: Iterable[tuple[str, str]]) -> list[Effect]:
    return [
        ToGenerator(generator_id=name, command=pb.GeneratorCommand(idle=pb.Idle(cause=cause))) for name, cause in causes
    ]
