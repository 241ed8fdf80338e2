"""Who may call what, where peers show certificates: the role in a leaf's URI against the table below.

    streamrl://<namespace>/<job>/<role>     in the subject alternative names of every leaf

Owns the table of roles and the refusals. Does not own certificates (`tls.py`): the handshake has already shown that the
peer's is of our authority and not expired. A refusal is one line for the peer, and one in our log for each peer.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import grpc
import grpc.aio

from streamrl.names import role_uri
from streamrl_workers.stream.admission import Context, guarded

Role = Literal["scheduler", "trainer", "generator"]

ROLES: Mapping[str, Role] = {
    "/streamrl.v1alpha1.Scheduler/Generate": "generator",
    "/streamrl.v1alpha1.Scheduler/GetModel": "generator",
    "/streamrl.v1alpha1.Scheduler/Train": "trainer",
    "/streamrl.v1alpha1.Weights/GetManifest": "generator",
    "/streamrl.v1alpha1.Weights/Fetch": "generator",
}
"""Method -> the one role that has business with it; a method that is not here is nobody's."""

_URI = re.compile(r"streamrl://([^/]+)/([^/]+)/([^/]+)")
_SAN = "x509_subject_alternative_name"
"""Key of gRPC's authentication context: every alternative name of the peer's leaf, of whatever kind."""
_MOST_TOLD = 1024
"""Peers whose refusal is remembered as logged; beyond it they are only refused."""

log = logging.getLogger("streamrl.admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who the holder of a leaf is."""

    namespace: str
    job: str
    role: str

    def __str__(self) -> str:
        return role_uri(self.namespace, self.job, self.role)


def parse_identity(uri: str) -> Identity | None:
    """The identity that a URI names; None: it is none of ours."""
    found = _URI.fullmatch(uri)
    return None if found is None else Identity(namespace=found[1], job=found[2], role=found[3])


class RoleInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Aborts calls of peers that have no business with the method, or belong to another job than `me`."""

    def __init__(self, me: Identity) -> None:
        self._me = me
        self._told: set[tuple[str, str]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Put the check before the handler: only there is the peer known."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        return guarded(handler, lambda context: self._admit(context, method))

    async def _admit(self, context: Context, method: str) -> None:
        names = [name.decode(errors="replace") for name in context.auth_context().get(_SAN, ())]
        peers = [identity for identity in map(parse_identity, names) if identity is not None]
        if len(peers) != 1:
            code, rule = grpc.StatusCode.UNAUTHENTICATED, "its certificate must name exactly one role of a job"
        elif (peers[0].namespace, peers[0].job) != (self._me.namespace, self._me.job):
            code, rule = grpc.StatusCode.PERMISSION_DENIED, f"this is job {self._me.namespace}/{self._me.job}"
        elif ROLES.get(method) != peers[0].role:
            wanted = ROLES.get(method, "nobody")
            code, rule = grpc.StatusCode.PERMISSION_DENIED, f"{method} is for {wanted}"
        else:
            return
        who = ", ".join(map(str, peers)) or "a peer without a role"
        self._tell(who, peer=_host(context.peer()), text=rule)
        await context.abort(code, f"{who}: {rule}")

    def _tell(self, who: str, *, peer: str, text: str) -> None:
        if (who, peer) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add((who, peer))
            log.warning("refused %s at %s: %s", who, peer, text)


def _host(peer: str) -> str:
    """Without the port, which is another for each connection."""
    return peer.rpartition(":")[0]
