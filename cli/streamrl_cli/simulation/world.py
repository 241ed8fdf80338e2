"""Runs a scenario to its end: wires the parts, moves the clock, and says what is awaited if the run does not end.

Owns the loop. Does not own what happens in it.
"""

from functools import partial

from streamrl.errors import UserError
from streamrl_cli.reporting.chrome_trace import ChromeTrace
from streamrl_cli.simulation.generator import ModelledGenerator
from streamrl_cli.simulation.lengths import LengthModel, Rows
from streamrl_cli.simulation.replicas import Replicas
from streamrl_cli.simulation.results import Measures, SimulationResult
from streamrl_cli.simulation.scenario import Kill, Leave, RestartTrainer, Scenario, ScenarioEvent
from streamrl_cli.simulation.shell import Shell
from streamrl_cli.simulation.trainer import ModelledTrainer
from streamrl_workers.metrics.bubbles import ProcessWall


def simulate(scenario: Scenario, *, rows: Rows | None = None, trace: ChromeTrace | None = None) -> SimulationResult:
    """Run the scenario.

    Args:
        scenario: what is simulated.
        rows: content of `lengths.file`, if the scenario names one.
        trace: takes every span, if given.

    Raises:
        UserError: the run does not end; one line that says what is awaited.
    """
    world = World(scenario, rows=rows, trace=trace)
    world.run()
    return world.outcome()


class World:
    """One run."""

    def __init__(self, scenario: Scenario, *, rows: Rows | None = None, trace: ChromeTrace | None = None) -> None:
        self._scenario = scenario
        self.measures = Measures(trace=trace)
        self._shell = Shell(scenario, lengths=LengthModel(scenario, rows=rows), measures=self.measures)
        self._trainer = ModelledTrainer(self._shell, scenario)
        self._replicas = Replicas(self._shell, scenario, trainer=self._trainer)
        self._busy_s = 0.0
        """When anything but heartbeats and polls last happened."""

    def run(self) -> None:
        """Until the scheduler says that the run is over."""
        shell, timeline = self._shell, self._shell.timeline
        limit_s, patience_s = self._scenario.limit_seconds, self._replicas.patience_s
        self._start()
        while not shell.finished:
            if timeline.coming:
                self._busy_s = timeline.now_s
            elif timeline.now_s - self._busy_s > patience_s:
                raise self._stuck(f"nothing more happens after {self._busy_s:.6g} s")
            if timeline.next_s > limit_s:
                raise self._stuck(f"limitSeconds {limit_s:g} are over")
            timeline.step()
            shell.settle()
        self._close()

    def outcome(self) -> SimulationResult:
        """What became of it."""
        return SimulationResult(
            scenario=self._scenario,
            measures=self.measures,
            wall_s=self._shell.timeline.now_s,
            events=self._shell.timeline.events,
            core_calls=self._shell.calls,
            reissued_samples=self._shell.core.view().reissued_samples,
            moved_samples=self._shell.core.view().moved_samples,
        )

    def _start(self) -> None:
        shell = self._shell
        shell.tell(lambda core, now_s: core.start(now_s))
        shell.timeline.at(0.0, self._trainer.connect)
        self._replicas.start()
        for event in self._scenario.events:
            shell.timeline.at(event.at_seconds, partial(self._happen, event))

    def _happen(self, event: ScenarioEvent, _: object) -> None:
        match event.value:
            case Kill() as kill:
                self._replicas.end(kill.generator, returns=kill.returns, how=ModelledGenerator.die)
            case Leave() as leave:
                self._replicas.end(leave.generator, returns=leave.returns, how=ModelledGenerator.leave)
            case RestartTrainer() as restart:
                self._trainer.restart(restart.down_seconds)

    def _close(self) -> None:
        now_s = self._shell.timeline.now_s
        self._replicas.close()
        wall = self._trainer.wall
        cost = float(self._scenario.trainer.cost_per_hour)
        found = ProcessWall(wall_s=wall.wall_s(now_s=now_s), parts=wall.parts(now_s=now_s), cost_per_hour=cost)
        self.measures.walls["trainer"].append(found)

    def _stuck(self, why: str) -> UserError:
        """Names who is waited for."""
        view = self._shell.core.view()
        connected = len(self._shell.generators)
        if not connected:
            awaited = "a generator: none is connected"
        elif not self._trainer.connected:
            awaited = "the trainer: it is not connected"
        elif view.active_leases:
            awaited = f"samples under way: {view.active_leases}, on generators: {connected}"
        elif view.waiting_samples:
            causes = ", ".join(f"{cause} ({count})" for cause, count in view.fleet.idle.items() if count)
            awaited = f"a generator that takes waiting samples: {view.waiting_samples}, {causes or 'no slot is free'}"
        else:
            awaited = f"the trainer, which holds groups: {view.delivered_groups}"
        rule = f"{why} in step {view.step} of {view.steps}; it waits for {awaited}"
        return UserError(field="simulation", rule=rule)
