"""Which replicas there are: pools from start to end, their sizes by the operator's own policies, deaths and returns.

Owns replicas by name, heartbeats, and the page of numbers that a policy decides from. Does not own decisions on sizes
(`streamrl_operator.autoscaler`, as in a cluster), nor a replica's own life (`generator.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from streamrl_cli.runner.scaling import POLL_S
from streamrl_cli.simulation.engine import PoolModel
from streamrl_cli.simulation.generator import ModelledGenerator
from streamrl_cli.simulation.results import SizeChange
from streamrl_cli.simulation.scenario import Scenario, ScenarioPool, pool_of
from streamrl_cli.simulation.shell import Shell
from streamrl_cli.simulation.trainer import ModelledTrainer
from streamrl_operator.autoscaler import POLICIES
from streamrl_operator.autoscaler.values import ScalingState, generator_name, observe
from streamrl_workers.metrics.bubbles import ProcessWall, WallPartition
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.dispatch.status import dispatch_status
from streamrl_workers.scheduler.effects import Effect

BEATS_PER_LEASE = 4
"""As the link of a generator that generates nothing sends them; one that generates sends one each second, which tells the same, only earlier."""


@dataclass(slots=True)
class _Sized:
    """One pool and how large it is to be."""

    spec: ScenarioPool
    model: PoolModel
    state: ScalingState
    missing: set[str] = field(default_factory=set)
    """Replicas that do not come back."""


class Replicas:
    """All pools of a run."""

    def __init__(self, shell: Shell, scenario: Scenario, *, trainer: ModelledTrainer) -> None:
        self._shell = shell
        self._trainer = trainer
        self._replicas: dict[str, ModelledGenerator] = {}
        self._instances = 0
        self._lease_s = scenario.scheduling.lease_seconds
        self._beats: dict[str, dict[str, Any]] = {}
        """Process -> its line of the page, as of its last heartbeat."""
        self._pools = {
            pool.name: _Sized(
                pool,
                PoolModel.of(pool, weight_bytes=scenario.trainer.weight_bytes),
                ScalingState(wanted=pool.scaling.initial),
            )
            for pool in scenario.pools
        }
        self._elastic = [pool for pool in self._pools.values() if pool.spec.scaling.key != "static"]

    @property
    def patience_s(self) -> float:
        """For so long a policy may still change something although nothing else happens."""
        cooldowns = [pool.spec.scaling.auto.cooldown_seconds for pool in self._elastic if pool.spec.scaling.auto]
        return 2 * max(cooldowns, default=0.0) + 10 * self._lease_s

    def start(self) -> None:
        """The replicas of the start are there at once."""
        for pool in self._pools.values():
            self._resized(pool, reason="at the start")
            for ordinal in range(pool.state.wanted):
                self._launch(pool, ordinal, delay_s=0.0)
        self._shell.timeline.after(self._lease_s / BEATS_PER_LEASE, self._beat, background=True)
        if self._elastic:
            self._shell.timeline.after(POLL_S, self._poll, background=True)

    def close(self) -> None:
        """The run is over: walls of those that are still there."""
        for generator in self._replicas.values():
            self._wall_ends(generator)
        self._replicas.clear()

    def end(self, name: str, *, returns: bool, how: Callable[[ModelledGenerator], None]) -> None:
        """The replica dies or is told to go, if there is one."""
        pool, generator = self._pools[pool_of(name) or ""], self._replicas.get(name)
        if not returns:
            pool.missing.add(name)
        if generator is not None:
            how(generator)

    # ---- life

    def _launch(self, pool: _Sized, ordinal: int, *, delay_s: float) -> None:
        self._instances += 1
        name = generator_name(pool.spec.name, ordinal=ordinal)
        generator = ModelledGenerator(
            self._shell, name=name, instance=f"{name} {self._instances}", pool=pool.model, gone=self._gone
        )
        self._replicas[name] = generator
        self._shell.timeline.after(delay_s, generator.connect)

    def _gone(self, generator: ModelledGenerator) -> None:
        """Its process has ended; another one takes its place if the pool is to have it."""
        self._wall_ends(generator)
        del self._replicas[generator.name]
        self._beats.pop(generator.name, None)
        self._fill(self._pools[generator.pool.name])

    def _wall_ends(self, generator: ModelledGenerator) -> None:
        now_s = self._shell.timeline.now_s
        wall = ProcessWall(
            wall_s=generator.wall.wall_s(now_s=now_s),
            parts=generator.wall.parts(now_s=now_s),
            cost_per_hour=generator.pool.cost_per_hour,
        )
        self._shell.measures.walls[generator.pool.name].append(wall)

    def _fill(self, pool: _Sized) -> None:
        """Start what is missing, tell what is too much to go: the highest ordinals."""
        wanted = [generator_name(pool.spec.name, ordinal=ordinal) for ordinal in range(pool.state.wanted)]
        for ordinal, name in enumerate(wanted):
            if name not in self._replicas and name not in pool.missing:
                self._launch(pool, ordinal, delay_s=pool.model.start_s)
        for name in [name for name, one in self._replicas.items() if one.pool is pool.model and name not in wanted]:
            if name in self._replicas:  # one that had not connected yet goes at once, and may take others with it
                self._replicas[name].leave()

    # ---- heartbeats and sizes

    def _beat(self, _: object) -> None:
        """All replicas and the trainer say that they live; the scheduler looks at its clocks."""
        shell, now_s = self._shell, self._shell.timeline.now_s
        for generator in [one for one in self._replicas.values() if one.connected]:
            shell.tell(partial(_alive, generator))
            if self._elastic:
                line = _line(generator.name, generator.wall, now_s=now_s)
                tokens = sum(steps.tokens for steps in generator.step_times().values())
                more = {"slots": generator.pool.slots, "active": generator.active, "tokens": tokens}
                self._beats[generator.name] = line | more
        if self._elastic and self._trainer.connected:
            self._beats["trainer"] = _line("trainer", self._trainer.wall, now_s=now_s)
        shell.tell(lambda core, at_s: core.tick(at_s))
        shell.timeline.after(self._lease_s / BEATS_PER_LEASE, self._beat, background=True)

    def _poll(self, _: object) -> None:
        """Each elastic pool's policy decides, as the local runner and the operator have it decide."""
        now_s = self._shell.timeline.now_s
        page = self._page()
        for pool in self._elastic:
            seen = observe(page, pool=pool.spec.name, wanted=pool.state.wanted, now_s=now_s)
            decide = POLICIES[pool.spec.scaling.key]
            decision, after = decide(pool.spec.scaling, state=pool.state, seen=seen, now_s=now_s)
            before, pool.state = pool.state.wanted, after
            if decision.replicas != before:
                self._resized(pool, reason=decision.reason)
                self._fill(pool)
        self._shell.timeline.after(POLL_S, self._poll, background=True)

    def _page(self) -> dict[str, Any]:
        """The scheduler's `/numbers`, as far as a policy reads it."""
        view, now_s = self._shell.core.view(), self._shell.timeline.now_s
        steps = self._shell.measures.steps
        lines = [self._beats[name] for name, one in self._replicas.items() if one.connected and name in self._beats]
        return {
            "ended": view.ended,
            "attempt": view.attempt,
            "step": view.step,
            "queue": view.waiting_samples,
            "generators": lines,
            "trainer": self._beats.get("trainer") if self._trainer.connected else None,
            "dispatch": dispatch_status(view.order, view.speeds),
            "scaling": {"since_step_s": now_s - (steps[-1].at_s if steps else 0.0)},
        }

    def _resized(self, pool: _Sized, *, reason: str) -> None:
        change = SizeChange(
            at_s=self._shell.timeline.now_s, pool=pool.spec.name, replicas=pool.state.wanted, reason=reason
        )
        self._shell.measures.sizes.append(change)


def _alive(generator: ModelledGenerator, core: Core, now_s: float) -> list[Effect]:
    """A heartbeat, with what the scheduler's service reads out of it."""
    return core.generator_alive(generator.name, now_s=now_s, reading=generator.step_times())


def _line(name: str, wall: WallPartition, *, now_s: float) -> dict[str, Any]:
    return {"id": name, "bubbles": wall.parts(now_s=now_s), "wall_s": wall.wall_s(now_s=now_s)}
