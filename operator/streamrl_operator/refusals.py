"""What is said of a job when an API server will not or cannot take something of it, until that is over."""

from collections.abc import Sequence
from datetime import datetime

from streamrl.status import RLJobStatus
from streamrl_operator.kube.cluster import NameTakenError
from streamrl_operator.kube.errors import SERVER_ERROR, KubeError, RefusedError
from streamrl_operator.planning import obstacle, stored
from streamrl_operator.planning.conditions import READY, Aspect
from streamrl_operator.planning.values import Object

Refusal = NameTakenError | RefusedError
"""Asking again will not help."""


def of(refused: Sequence[Refusal]) -> Aspect:
    """In the words of the first, which may be why the others were."""
    first, rest = refused[0], len(refused) - 1
    reason = "NameTaken" if isinstance(first, NameTakenError) else "Refused"
    message = f"{first}; and {rest} more" if rest else str(first)
    return Aspect(type=READY, holds=False, reason=reason, message=message)


def lasting(error: KubeError, *, failures: int) -> Aspect | None:
    """Of a server that answers, and with an error time after time: a webhook that fails, say. None: that may pass, or nobody answers."""
    if error.status < SERVER_ERROR or failures < _LASTING:
        return None
    return Aspect(type=READY, holds=False, reason="ServerError", message=f"{error}; it is tried again")


_LASTING = 4
"""Looks in a row that fail: a second or two, in which an API server has another leader or is begun again."""


def written(raw: Object, status: RLJobStatus, told: Aspect, *, now: datetime) -> Object:
    """The status, as it is written, with what is in the way. `raw`: the job as stored."""
    before, generation = stored.job_status(raw).conditions, raw["metadata"].get("generation")
    return stored.plain(obstacle.obstructed(status, told, before=before, now=now, generation=generation))
