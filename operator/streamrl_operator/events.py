"""What people are told of a job beside its status: events, and the condition of what an API server will not or cannot take.

Owns: the events' names, so that one that was sent and forgotten (the operator died before the status was written) is not sent twice, and a
reconcile that fails again and again says so once. An event that cannot be sent is logged and dropped: it never stops a reconcile.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl_operator.clock import OperatorClock, timestamp
from streamrl_operator.kube.answers import SERVER_ERROR, ConflictError, KubeError, RequestRefusedError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.cluster import NameTakenError, ObjectMissingError
from streamrl_operator.kube.kinds import EVENT, RLJOB
from streamrl_operator.planning.conditions import READY, Aspect
from streamrl_operator.planning.values import JobEvent

log = logging.getLogger(__name__)

_CONTROLLER = "streamrl.io/operator"
_MAX_NOTE = 1024
"""Bytes of a note that the API server takes."""
_REMEMBERED = 2048


@dataclass(slots=True, kw_only=True)
class Events:
    """Where events go."""

    client: Client
    clock: OperatorClock
    instance: str
    """This process."""
    _sent: dict[str, None] = field(default_factory=dict)

    async def send(self, raw: Mapping[str, Any], event: JobEvent, *, since: str) -> None:
        """Tell of the job; `since`: what must be another for the same words to be news (a version, a generation)."""
        metadata = raw["metadata"]
        reported = f"{metadata['uid']}/{since}/{event.reason}/{event.message}"
        name = f"{metadata['name']}.{hashlib.sha256(reported.encode()).hexdigest()[:16]}"
        if name in self._sent:
            return
        extra = {"job": metadata["name"], "namespace": metadata["namespace"], "reason": event.reason}
        log.log(logging.INFO if event.kind == "Normal" else logging.WARNING, event.message, extra=extra)
        try:
            await self.client.create(EVENT, self._object(raw, event, name))
        except ConflictError:
            pass
        except KubeError as error:
            log.warning("event is lost", extra={**extra, "error": str(error)})
            return
        self._sent[name] = None
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]

    def _object(self, raw: Mapping[str, Any], event: JobEvent, name: str) -> dict[str, Any]:
        metadata = raw["metadata"]
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "eventTime": timestamp(self.clock.now()),
            "reportingController": _CONTROLLER,
            "reportingInstance": self.instance[:128],
            "action": "Reconcile",
            "reason": event.reason,
            "type": event.kind,
            "note": event.message.encode()[:_MAX_NOTE].decode(errors="ignore"),
            "regarding": {
                "apiVersion": RLJOB.api_version,
                "kind": RLJOB.kind,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
        }


Refusal = NameTakenError | ObjectMissingError | RequestRefusedError
"""Asking again will not help, until a person has changed something."""
_NAMED = 3
"""Refusals of one look that are worded; the first may be why the others were."""


def refusal_condition(refused: Sequence[Refusal]) -> Aspect:
    """Return the condition Ready of a job of which something was refused; its reason is that of the first."""
    first, rest = refused[0], len(refused) - _NAMED
    reason = "NameTaken" if isinstance(first, NameTakenError) else "Refused"
    reason = "ObjectMissing" if isinstance(first, ObjectMissingError) else reason
    texts = [*map(str, refused[:_NAMED]), *([f"and {rest} more"] if rest > 0 else [])]
    return Aspect(type=READY, holds=False, reason=reason, message="; ".join(texts))


def server_error_condition(error: KubeError, *, failures: int) -> Aspect | None:
    """Of a server that answers, and with an error time after time: a webhook that fails, say. None: that may pass, or nobody answers, or it is
    the request's own fault."""
    if isinstance(error, RequestRefusedError) or error.status < SERVER_ERROR or failures < _LASTING:
        return None
    return Aspect(type=READY, holds=False, reason="ServerError", message=f"{error}; it is tried again")


_LASTING = 4
"""Looks in a row that fail: a second or two, in which an API server has another leader or is begun again."""
