"""The trip of each event through the scheduler's core: modules that it enters, and moves between modules.

A move is a call into another module, or a return to it. `scheduler` counts modules of `streamrl_workers/scheduler` alone, `workers` all of
`streamrl_workers`: what the core asks of other packages is part of the trip as well.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import FrameType
from typing import Any

from streamrl.mixture import Mixture
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.settings import SchedulerSettings, TaskSettings
from support.core_world import World, settings

WORKERS = "/streamrl_workers/"
SCHEDULER = f"{WORKERS}scheduler/"
ROUNDS = 400


@dataclass(frozen=True, slots=True)
class Trip:
    """Modules, and moves between them."""

    modules: float
    moves: float


@dataclass(slots=True)
class _Route:
    """Modules below a folder, in the order in which one event enters them."""

    below: str
    passed: list[str] = field(default_factory=list)

    def enter(self, file: str) -> None:
        if self.below in file and (not self.passed or self.passed[-1] != file):
            self.passed.append(file)

    def trip(self) -> Trip:
        return Trip(len(set(self.passed)), max(0, len(self.passed) - 1))


class _Measured:
    """A core whose events are measured: the outermost calls of its public methods."""

    def __init__(self, core: Core, trips: Mapping[str, dict[str, list[Trip]]]) -> None:
        self._core = core
        self._trips = trips

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._core, name)
        return self._measured(name, found) if callable(found) and not name.startswith("_") else found

    def _measured(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            routes = _Route(SCHEDULER), _Route(WORKERS)

            def see(frame: FrameType, event: str, _arg: object) -> None:
                target = frame if event == "call" else frame.f_back if event == "return" else None
                if target is not None:
                    for route in routes:
                        route.enter(target.f_code.co_filename)

            before = sys.getprofile()
            sys.setprofile(see)
            try:
                return method(*args, **kwargs)
            finally:
                sys.setprofile(before)
                for route in routes:
                    self._trips[route.below].setdefault(name, []).append(route.trip())

        return call


class MeasuredWorld(World):
    """A world that measures the trips of its core's events."""

    def __init__(self, job: SchedulerSettings, *, pools: Mapping[str, str]) -> None:
        self.trips: defaultdict[str, dict[str, list[Trip]]] = defaultdict(dict)
        super().__init__(job, slots=(3, 2))
        self.pools = dict(pools)

    def make_core(self) -> Any:
        return _Measured(super().make_core(), self.trips)

    def medians(self, below: str) -> dict[str, Trip]:
        """Event -> its median trip."""
        return {
            name: Trip(statistics.median(one.modules for one in trips), statistics.median(one.moves for one in trips))
            for name, trips in self.trips[below].items()
        }


def _sampling(tokens: int) -> pb.Sampling:
    return pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=tokens)


def plain() -> MeasuredWorld:
    """One task, two generators."""
    return _run(settings(steps=4), names=("g0", "g1"))


def full() -> MeasuredWorld:
    """A mixture of two tasks, of which one has an environment, and a pool of the frozen model."""
    tasks = (
        TaskSettings(name="sums", sampling=_sampling(4)),
        TaskSettings(name="games", sampling=_sampling(8), max_turns=3),
    )
    job = settings(steps=4, tasks=tasks, shares=Mixture([1, 2]), reference_pool="f")
    return _run(job, names=("g0", "g1", "g2"), pools={"g2": "f"})


def _run(job: SchedulerSettings, *, names: Sequence[str], pools: Mapping[str, str] | None = None) -> MeasuredWorld:
    """Run to the end; the events are the same in every run."""
    run = MeasuredWorld(job, pools=pools or {})
    run.start_trainer()
    for name in names:
        run.join_generator(name)
    chance = Random(3)
    for _ in range(ROUNDS):
        if run.finished:
            break
        run.now_s += 0.1
        run.progress_some(chance, pace=0.7, finish=0.4)
        run.do(run.core.tick(run.now_s))
    run.run_out()
    return run
