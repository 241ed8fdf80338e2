"""The one door to the core: calls it and carries out its effects, in order, on one event loop.

Owns the order of effects, the answer to each journal commit, and the way to the task pool and back. Decides nothing.

Task loop: consumes results of the pool; produces prompts, scores and turns' answers for the core, those that are there
together as one event; waits for the pool, whose time limits bound every item.

Invariants: effects of one event are carried out before the next event reaches the core. Once the process's exit is
decided the core is called no more, nothing is appended to the journal and nothing is sent: a call is without effect.
The first exception, of the core or of an effect, decides it. What that call had appended before is a prefix of its
records, as after a kill.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, Protocol

from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler.core import Core
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.lifetime import ExitDecision, report
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Prompt, Request, Result, Score, ScoreSample, TurnAnswer


class TaskSource(Protocol):
    """What the executor needs of the task pool."""

    def put(self, request: Request) -> None:
        """Ask for prompts, a score or a turn's answer."""

    async def results(self) -> Sequence[Result]:
        """What has been done since the last call, at least one."""


P = ParamSpec("P")


class Executor:
    """Effects in, I/O out."""

    def __init__(
        self,
        core: Core,
        *,
        journal: JournalWriter,
        connections: Connections,
        status: StatusEndpoint,
        ending: ExitDecision,
    ) -> None:
        self._core = core
        self._status = status
        self._journal = journal
        self._connections = connections
        self._ending = ending
        self._goes_on = False
        self._on_result: Callable[[Result], None] = lambda result: None
        self._carry_out: dict[type, Callable[[Any], None]] = {
            fx.ToGenerator: lambda effect: connections.to_generator(effect.generator_id, effect.command),
            fx.ToTrainer: lambda effect: connections.to_trainer(effect.command),
            fx.DeliverGroup: self._deliver_group,
            fx.Write: journal.append,
            fx.Finished: lambda effect: ending.finished(effect.step),
            fx.Failed: lambda effect: ending.user_error(effect.reason),
        }

    def attach(self, pool: TaskSource) -> None:
        """Connect the task pool, before the first effect."""
        self.carry_out(dict.fromkeys((NeedPrompts, ScoreSample, PlayTurn), pool.put))

    def carry_out(self, effects: Mapping[type, Callable[[Any], None]]) -> None:
        """Have effects of these types carried out so."""
        self._carry_out |= effects

    def watch(
        self, effects: Mapping[type, Callable[[Any], None]], *, result: Callable[[Result], None] | None = None
    ) -> None:
        """Have effects seen before they are carried out, and results before the core has them."""
        self._carry_out |= {kind: _both(watch, self._carry_out[kind]) for kind, watch in effects.items()}
        self._on_result = result or self._on_result

    def call(self, event: Callable[P, Sequence[fx.Effect]], *args: P.args, **kwargs: P.kwargs) -> None:
        """Bring an event to the core, `event` being the core's method, and carry out the effects."""
        if self._ending.ending is not None:
            return
        try:
            for effect in event(*args, **kwargs):
                if self._ending.ending is None:
                    self._carry_out[type(effect)](effect)
            if self._core.has_more and not self._goes_on:
                self._goes_on = True
                asyncio.get_running_loop().call_soon(self._go_on)
        except BaseException as error:
            report(error, ending=self._ending)
            if not isinstance(error, Exception):
                raise

    def _go_on(self) -> None:
        self._goes_on = False
        self.call(self._core.resume)

    async def run_tasks(self, pool: TaskSource) -> None:
        """The task loop."""
        while True:
            results = await pool.results()
            for result in results:
                self._on_result(result)
            if answers := [result for result in results if isinstance(result, TurnAnswer)]:
                self.call(self._core.turns_answered, answers)
            if scores := [result for result in results if isinstance(result, Score)]:
                self.call(self._core.scores_arrived, scores)
            if prompts := [result for result in results if isinstance(result, Prompt)]:
                self.call(self._core.prompts_arrived, prompts)

    def on_committed(self, sequence: int) -> None:
        """Records are durable."""
        self.call(self._committed, sequence)

    def _committed(self, sequence: int) -> Sequence[fx.Effect]:
        effects = self._core.committed(sequence)
        self._status.observe()
        return effects

    def _deliver_group(self, effect: fx.DeliverGroup) -> None:
        """The samples of a group that was delivered before are in the journal only."""
        if not effect.trajectories:
            effect = replace(effect, trajectories=self._journal.samples_of(effect.group_id))
        self._connections.deliver_group(effect)


def _both(watch: Callable[[Any], None], act: Callable[[Any], None]) -> Callable[[Any], None]:
    def done(effect: Any) -> None:  # noqa: ANN401 - of the type that both take
        watch(effect)
        act(effect)

    return done
