"""What happens when a worker process ends. Pure."""

import signal as _signal
from dataclasses import dataclass
from typing import Literal

from streamrl.errors import EXIT_DONE, EXIT_RETRY, EXIT_USER_ERROR

Action = Literal["finish", "restart", "fail"]

FIRST_BACKOFF_S = 0.25
"""Wait before a restart; doubles with each further quick death of the same process."""
LONGEST_BACKOFF_S = 10.0
"""A process that keeps dying is not tried more often than this."""
QUICK_DEATH_S = 60.0
"""A process that has lived longer has shown that it can; its next death is a first one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do about a process that ended, and why."""

    action: Action
    reason: str
    backoff_s: float = 0.0


def judge_exit(
    *, name: str, exit_code: int, run_ended: bool, quick_deaths: int, restarts: int, max_restarts: int
) -> Verdict:
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
        return Verdict(action="finish", reason=f"{name} is done")
    how = _describe(exit_code)
    if exit_code == EXIT_USER_ERROR:
        return Verdict(action="fail", reason=f"{name} refused its input")
    if restarts >= max_restarts:
        return Verdict(action="fail", reason=f"{name} {how} after {restarts} restarts (failurePolicy.maxRestarts)")
    backoff_s = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(max(0, quick_deaths - 1), 10))
    return Verdict(action="restart", reason=f"{name} {how}", backoff_s=backoff_s)


def _describe(exit_code: int) -> str:
    if exit_code < 0:
        try:
            return f"was killed by {_signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    if exit_code == EXIT_DONE:
        return "left before the run had ended"
    if exit_code == EXIT_RETRY:
        return "asked to be started again"
    return f"ended with exit code {exit_code}"
