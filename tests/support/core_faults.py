"""A world whose core sits behind the real executor, with an exception at one chosen call of the core or at one effect.

    World ── events ──▶ Door ──▶ Executor (real) ──▶ Faulty ──▶ Core (real)
      ▲                             │ effects
      └── peers, journal, task pool ┘

The run is driven by a script that brings about every event: deaths, leaves, silence, failing weights and scores, turns.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.executor import Executor
from streamrl_workers.scheduler.server.lifetime import ExitDecision
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from support.core_world import World
from support.jobs import parsed_job

EVENTS = tuple(
    name
    for name, value in vars(Core).items()
    if callable(value) and not name.startswith(("_", "is_")) and name != "view"
)
"""Every method that takes an event."""
READINGS = ("view", "last_step", "last_evaluation", "plan")
"""What metrics read."""
EFFECTS = tuple(effect.__name__ for effect in fx.Effect.__args__)
RECORDS = tuple(record.__name__ for record in rec.Record.__args__)
ROUNDS = 400


class InjectedError(RuntimeError):
    """The exception of the campaign."""


@dataclass(slots=True)
class Fault:
    """Raises at call number `call` of `target`; counts all calls."""

    target: str = ""
    call: int = 0
    after: bool = False
    """Behind what the call does, else before."""
    counts: Counter[str] = field(default_factory=Counter)
    fired: bool = False
    armed: bool = False
    """Before the executor stands, an exception ends the process as any other would."""

    def around(self, target: str, act: Callable[[], Any]) -> Any:
        """Do it, or raise."""
        if not self.armed:
            return act()
        self.counts[target] += 1
        hit = target == self.target and self.counts[target] == self.call
        self.fired |= hit
        if hit and not self.after:
            raise InjectedError(target)
        value = act()
        if hit:
            raise InjectedError(target)
        return value


class Faulty:
    """A core that raises where it is told to."""

    def __init__(self, core: Core, fault: Fault) -> None:
        self._core, self._fault = core, fault

    def __getattr__(self, name: str) -> Any:
        if name in EVENTS or name == "view":
            return lambda *args, **more: self._fault.around(name, lambda: getattr(self._core, name)(*args, **more))
        return self._fault.around(name, lambda: getattr(self._core, name))


class Door:
    """What the world takes for the core: every event goes through the executor; the world's own looks are not counted."""

    def __init__(self, core: Core, faulty: Faulty, executor: Executor) -> None:
        self._core, self._faulty, self._executor = core, faulty, executor

    def __getattr__(self, name: str) -> Any:
        if name not in EVENTS:
            return getattr(self._core, name)
        return lambda *args, **more: self._call(name, *args, **more)

    def _call(self, name: str, *args: Any, **more: Any) -> Sequence[fx.Effect]:
        if name == "committed":
            self._executor.on_committed(*args)
        else:
            self._executor.call(getattr(self._faulty, name), *args, **more)
        return []


class Outside:
    """Everybody that effects go to, as the executor knows them."""

    def __init__(self, world: "ShellWorld") -> None:
        self._world = world

    def _do(self, effect: fx.Effect) -> None:
        self._world.fault.around(type(effect).__name__, lambda: self._world.take(effect))

    ask = put = deliver_group = _do

    def append(self, write: fx.Write) -> None:
        name = type(write.record).__name__
        self._world.fault.around("Write", lambda: self._world.fault.around(name, lambda: self._world.take(write)))

    def samples_of(self, group_id: int) -> Sequence[bytes]:
        return next(r for r in self._world.durable if isinstance(r, rec.Scored) and r.group_id == group_id).trajectories

    def to_generator(self, generator_id: str, command: Any) -> None:
        self._do(fx.ToGenerator(generator_id=generator_id, command=command))

    def to_trainer(self, command: Any) -> None:
        self._do(fx.ToTrainer(command=command))


class FaultyEnding(ExitDecision):
    """How the process ends; both effects that end it may raise."""

    def __init__(self, injected: Fault) -> None:
        super().__init__()
        self._injected = injected

    def finished(self, step: int) -> None:
        self._injected.around("Finished", lambda: super(FaultyEnding, self).finished(step))

    def user_error(self, line: str) -> None:
        self._injected.around("Failed", lambda: super(FaultyEnding, self).user_error(line))


class ShellWorld(World):
    """A world behind the executor. Construct in a running event loop."""

    def __init__(self, job: Any, *, answers: bool, fault: Fault, folder: Path, hopeless: bool = False) -> None:
        """`answers`: it has a ranker, which is asked and answers later. `hopeless`: no sample gets a reward."""
        self.fault, self.folder, self.answers, self.hopeless = fault, folder, answers, hopeless
        self.asked: deque[fx.AskRanker] = deque()
        super().__init__(job)

    def make_core(self) -> Any:
        self.asked.clear()
        self.lengths = Lengths(LengthHistory(), signals=("Ranker", "History") if self.answers else ("History",))
        core = super().make_core()
        faulty, outside = Faulty(core, self.fault), Outside(self)
        self.ending = FaultyEnding(self.fault)
        self.fault.armed = False
        status = StatusEndpoint(faulty, job=parsed_job(), connections=Connections(), run_dir=self.folder)
        executor = Executor(faulty, journal=outside, connections=outside, status=status, ending=self.ending)
        executor.attach(outside)
        executor.carry_out({fx.AskRanker: outside.ask})
        self.status = status
        self.fault.armed = True
        return Door(core, faulty, executor)

    def take(self, effect: fx.Effect) -> None:
        """Carry one out."""
        if isinstance(effect, fx.AskRanker):
            self.asked.append(effect)
        super().take(effect)

    def do(self, effects: list[fx.Effect]) -> None:
        """The effects have been carried out behind the door."""
        self.finished = self.dead
        if not self.dead:
            self.check()
            if self.core.has_more:
                self.do(self.core.resume())

    @property
    def dead(self) -> bool:
        """Whether the executor calls the core no more."""
        return self.ending.ending is not None

    def close(self) -> None:
        """The process is gone."""
        self.status.close()

    def score(self, *, fail: bool) -> None:
        super().score(fail=fail or self.hopeless)

    def answer_ranker(self) -> None:
        """One question is answered."""
        ask = self.asked.popleft()
        if ask.prompts:
            self.do(self.core.prompts_ranked({key: float(len(text)) for key, text in ask.prompts}))
