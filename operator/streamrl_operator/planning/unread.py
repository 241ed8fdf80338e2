"""Whether a job is told of numbers that cannot be read: without them neither its progress nor its end is ever seen.

    scheduler ready, readings fail ──4 resyncs──▶ Ready says NumbersUnreachable, one event ──a good reading──▶ as before

A pod that starts, or is busy for a while, is no news. The condition is the memory: an operator that is replaced goes on saying it.
"""

from collections.abc import Sequence

from streamrl import names
from streamrl.status import RLJobStatus
from streamrl_operator.planning import conditions, finish
from streamrl_operator.planning.conditions import READY, Aspect
from streamrl_operator.planning.values import Event, Observed

UNREACHABLE = "NumbersUnreachable"
RESYNCS = 4
"""Two minutes, as the operator comes: longer than an API server, a node or a scheduler needs to come back."""
_REMEDY = (
    f"let the API server reach port {names.PORT_SIGNALS} of the trainer's pod, and the operator `get services/proxy` "
    "(docs/operations.md, On a cluster)"
)


def told(ready: Aspect, *, observed: Observed, before: RLJobStatus, resync_s: float) -> tuple[Aspect, Sequence[Event]]:
    """The condition Ready, and what is told once, where a job should run and `ready` is all else that is known."""
    unread, was_told = observed.unread, is_told(before)
    if unread is None:
        return ready, ()
    if not was_told and (observed.now - unread.since).total_seconds() < RESYNCS * resync_s:
        return ready, ()
    why = f"the scheduler's numbers cannot be read, so neither progress nor the end of the run is seen: {_REMEDY}"
    message = f"{why}; {unread.error}"
    unreachable = Aspect(type=READY, holds=False, reason=UNREACHABLE, message=f"{message}; {ready.message}")
    return unreachable, () if was_told else (finish.warning(UNREACHABLE, message),)


def is_told(status: RLJobStatus) -> bool:
    """Whether it is what Ready says."""
    ready = conditions.find(status.conditions, READY)
    return ready is not None and ready.reason == UNREACHABLE
