"""Processes that live and die together: the ranks of a trainer; every other worker is a unit of its own.

Owns what follows from an end: another start, the end of the unit, or the end of the run, by the failure policy.

Loop:
  watch  consumes: the first end among the unit's processes; produces: a restart of all of them, or the end of the run;
         waits for: the processes; unblocked by: an exit.

Invariants: ranks wait for each other in collectives, where one that is missing leaves the rest stuck and deaf, so when
one ends all are ended, and all begin again: one restart against the failure policy. A unit that was told to leave has
not died, however it ends.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR
from streamrl_cli.runner.plan import ProcessPlan
from streamrl_cli.runner.workers import Workers, failed, free_port, wait_for_ends

Action = Literal["finish", "restart", "fail"]
SETTLE_S = 1.0
"""Ranks that fail of the same cause end at nearly the same time; the one that says most is reported."""
GROUP_END_S = 5.0
"""Between SIGTERM and SIGKILL for ranks whose group is broken: one that is stuck in a collective hears nothing."""
FIRST_BACKOFF_S = 0.25
"""Wait before a restart; doubles with each further quick death of the same process."""
LONGEST_BACKOFF_S = 10.0
"""A process that keeps dying is not tried more often than this."""
QUICK_DEATH_S = 60.0
"""A process that has lived longer has shown that it can; its next death is a first one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartDecision:
    """What to do about a process that ended, and why."""

    action: Action
    reason: str
    backoff_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Failures:
    """The failure policy of a run: restarts of all its units together."""

    workers: Workers
    max_restarts: int
    say: Callable[[str], None]
    restarts: int = 0

    @property
    def run_ended(self) -> bool:
        """Whether the scheduler has written the run's result, good or bad."""
        return self.workers.folder.file(keys.FILE_RESULT).exists()

    def judge(self, name: str, *, exit_code: int, quick_deaths: int, processes: int = 1) -> RestartDecision:
        """What to do about an end in a unit of so many processes; a restart is counted and told.

        Raises `RunFailedError`: the run cannot go on.
        """
        verdict = judge_exit(
            name=name,
            exit_code=exit_code,
            run_ended=self.run_ended,
            quick_deaths=quick_deaths,
            restarts=self.restarts,
            max_restarts=self.max_restarts,
        )
        if verdict.action == "fail":
            log, since_bytes = self.workers.log_file(name), self.workers.log_starts[name]
            raise failed(reason=verdict.reason, exit_code=exit_code, log=log, since_bytes=since_bytes)
        if verdict.action == "restart":
            self.restarts += 1
            again = "it" if processes == 1 else f"all {processes} ranks"
            self.say(f"{verdict.reason}; starting {again} again ({self.restarts} of {self.max_restarts})")
        return verdict


@dataclass(slots=True, kw_only=True)
class Unit:
    """One process, or several that live and die together."""

    plans: tuple[ProcessPlan, ...]
    workers: Workers
    failures: Failures
    leaving: bool = False
    _running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of its processes."""
        return [plan.name for plan in self.plans]

    async def start(self) -> None:
        """Start all of them."""
        # An attempt that follows quickly must not meet the ranks of the one before.
        env = {keys.ENV_MASTER_PORT: str(free_port())} if len(self.plans) > 1 else {}
        for plan in self.plans:
            self._running[plan.name] = await self.workers.spawn(plan, env=env)

    async def watch(self) -> None:
        """Until it has ended for good. Raises `RunFailedError`: the run cannot go on."""
        quick_deaths = 0
        while not self._is_let_go():
            if not self._running:
                await self.start()
                if self._is_let_go():  # whoever let it go found nothing to end yet
                    await self.workers.end(self.names, by=signal.SIGKILL, grace_s=GROUP_END_S)
                    return
            born_s = time.monotonic()
            name, code = await self._first_end()
            if self._is_let_go():
                return
            if not self.failures.run_ended:
                name, code = await self._end_all(name, code)
            quick_deaths = quick_deaths + 1 if time.monotonic() - born_s < QUICK_DEATH_S else 1
            verdict = self.failures.judge(name, exit_code=code, quick_deaths=quick_deaths, processes=len(self.plans))
            if verdict.action == "finish":
                await asyncio.gather(*(process.wait() for process in self._running.values()))
                return
            await asyncio.sleep(verdict.backoff_s)
            self._running.clear()

    async def leave(self, *, grace_s: float) -> None:
        """Tell it to go in peace; after the grace it is killed."""
        self.leaving = True
        await self.workers.end(self.names, by=signal.SIGTERM, grace_s=grace_s)

    def _is_let_go(self) -> bool:
        return self.leaving or self.workers.stopping

    async def _first_end(self) -> tuple[str, int]:
        """(name, exit code) of the first that ends."""
        await wait_for_ends(self._running.values(), timeout_s=None, return_when=asyncio.FIRST_COMPLETED)
        codes = ((name, process.returncode) for name, process in self._running.items())
        ended = [(name, code) for name, code in codes if code is not None]
        return next(((name, code) for name, code in ended if code == EXIT_USER_ERROR), ended[0])

    async def _end_all(self, name: str, code: int) -> tuple[str, int]:
        """End the others; (name, exit code) of the end that says most: what a user got wrong, else the first."""
        others = [other for other in self._running if other != name]
        await wait_for_ends([self._running[other] for other in others], timeout_s=SETTLE_S if others else 0.0)
        codes = {other: self._running[other].returncode for other in others}
        await self.workers.end(others, by=signal.SIGTERM, grace_s=GROUP_END_S)
        return next(((other, EXIT_USER_ERROR) for other in others if codes[other] == EXIT_USER_ERROR), (name, code))


def judge_exit(
    *, name: str, exit_code: int, run_ended: bool, quick_deaths: int, restarts: int, max_restarts: int
) -> RestartDecision:
    """Decide on a process that ended by itself.

    Args:
        name: of the process.
        exit_code: as `asyncio.subprocess` gives it; negative = killed by that signal.
        run_ended: the scheduler has written the run's result, good or bad.
        quick_deaths: deaths of this process in a row, each within `QUICK_DEATH_S` of its start, this one included.
        restarts: restarts of all processes so far.
        max_restarts: `failurePolicy.maxRestarts`.
    """
    if run_ended and exit_code != EXIT_USER_ERROR:  # that is how the scheduler ends when the result is bad
        return RestartDecision(action="finish", reason=f"{name} is done")
    how = _describe(exit_code)
    if exit_code == EXIT_USER_ERROR:
        return RestartDecision(action="fail", reason=f"{name} refused its input")
    if restarts >= max_restarts:
        return RestartDecision(
            action="fail", reason=f"{name} {how} after {restarts} restarts (failurePolicy.maxRestarts)"
        )
    backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(max(0, quick_deaths - 1), 10))
    return RestartDecision(action="restart", reason=f"{name} {how}", backoff_s=backoff_s)


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    if exit_code == EXIT_DONE:
        return "left before the run had ended"
    if exit_code == EXIT_RETRY:
        return "asked to be started again"
    return f"ended with exit code {exit_code}"
