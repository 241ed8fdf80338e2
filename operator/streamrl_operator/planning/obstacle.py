"""What stands in the way of a job and only somebody else can clear: its condition Ready says so until it is gone."""

from collections.abc import Sequence
from datetime import datetime

from streamrl.status import Condition, RLJobStatus
from streamrl_operator.planning import conditions, finish
from streamrl_operator.planning.conditions import SUSPENDED, Aspect


def obstructed(
    status: RLJobStatus, obstacle: Aspect, *, before: Sequence[Condition], now: datetime, generation: int | None
) -> RLJobStatus:
    """The status with `obstacle` as its condition Ready. An end is never written over. `before`: the conditions as stored."""
    if finish.of_status(status) is not None:
        return status
    aspects = conditions.of_job(obstacle, suspended=conditions.kept(status.conditions, SUSPENDED))
    renewed = conditions.renewed(before, aspects, now=now, generation=generation)
    return status.model_copy(update={"observed_generation": generation, "conditions": renewed})
