"""Who may call a server of this run, decided before a handler sees the call.

    on one machine   holders of the run's token, a secret that every call carries as metadata; never logged
    in a cluster     roles of the job's certificates: streamrl://<namespace>/<job>/<role>, a URI in every leaf (of a generator in a member `…/generator/<cluster>`); `ROLES` says which method is whose

Owns the guard around handlers, the table of roles, the refusals. Does not own certificates (`tls.py`): the handshake has
shown that the peer's leaf is of our authority. A refusal is one line for the peer, and one in our log for each peer.

A caller that streams must not write before it was let in: to grpc's client a refusal that meets a write half-way is
INTERNAL, and the reason is lost. So the server says `ADMITTED` in the call's first metadata, and `await_admission`
waits for that. The metadata must leave first: else the first write sends it, and when that write is cancelled half-way
grpc can send no status after it, and the caller would wait for ever.
"""

import hmac
import inspect
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

import grpc
import grpc.aio

from streamrl.keys import GRPC_TOKEN_HEADER
from streamrl.names import role_uri

LOOPBACK = "127.0.0.1"
"""The address that servers of a local run bind to."""

Metadata = tuple[tuple[str, str], ...]


def call_metadata(token: str) -> Metadata:
    """Metadata of every call to a server of the run; a process with certificates may have no token."""
    return ((GRPC_TOKEN_HEADER, token),) if token else ()


ADMITTED = "streamrl-admitted"
"""Key of the metadata that says so."""

Context = Any
"""grpc.aio.ServicerContext: grpc ships no types."""
Refusal = tuple[grpc.StatusCode, str]
"""Whether a caller is unknown (UNAUTHENTICATED) or has no business here (PERMISSION_DENIED), and the reason."""
Admit = Callable[[Context], Awaitable[None]]
"""Returns, or aborts the call of one who may not make it."""


def guarded(handler: grpc.RpcMethodHandler, admit: Admit) -> grpc.RpcMethodHandler:
    """Return the same handler behind `admit`. Every method of ours answers by a stream.

    A method with a single request becomes one that reads a stream: of a unary request gRPC reads the message before the handler
    runs, and waits for it without a deadline. On the wire the two are the same.
    """
    if handler.request_streaming:
        behind = _behind(_telling(admit), handler.stream_stream)
    else:
        behind = _behind(admit, _of_first(handler.unary_stream))
    return grpc.stream_stream_rpc_method_handler(behind, handler.request_deserializer, handler.response_serializer)


def _of_first(behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Answer the first request of a stream."""

    async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            async for message in behaviour(request, context):
                yield message
            return

    return stream


async def await_admission(call: Any) -> None:  # noqa: ANN401 - any streaming call of grpc.aio's client
    """Wait until the server has let `call` in. The caller sets the deadline.

    Raises:
        grpc.aio.AioRpcError: it refuses, or is gone; the status is its own.
    """
    metadata = await call.initial_metadata()
    if any(key == ADMITTED for key, _ in metadata or ()):
        return
    code, details = await call.code(), await call.details()
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)


def _telling(admit: Admit) -> Admit:
    async def admit_and_tell(context: Context) -> None:
        await admit(context)
        await context.send_initial_metadata(((ADMITTED, "1"),))

    return admit_and_tell


def _behind(admit: Admit, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Of the same kind as `behaviour` (grpc asks whether it is a generator)."""
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ANN401 - any method's messages
            await admit(context)
            async with aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    yield message

        return stream

    async def answer(request: Any, context: Context) -> Any:  # noqa: ANN401 - any method's messages
        await admit(context)
        return await behaviour(request, context)

    return answer


class _Interceptor(grpc.aio.ServerInterceptor, ABC):  # type: ignore[misc]  # grpc ships no types
    """Puts the check before the handler: only there is the peer known."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        return guarded(handler, lambda context: self.admit(context, method))

    @abstractmethod
    async def admit(self, context: Context, method: str) -> None:
        """Return, or abort the call."""


class TokenDoor:
    """Lets in who has the run's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def refusal(self, given: str) -> Refusal | None:
        """Why a caller is not let in that has given this."""
        if hmac.compare_digest(given.encode(), self._token):
            return None
        return grpc.StatusCode.UNAUTHENTICATED, "this call does not carry the token of the run"


class TokenInterceptor(_Interceptor):
    """Aborts calls that do not carry the run's token."""

    def __init__(self, token: str) -> None:
        self._door = TokenDoor(token)

    async def admit(self, context: Context, method: str) -> None:
        given = dict(context.invocation_metadata() or ()).get(GRPC_TOKEN_HEADER, "")
        if (refusal := self._door.refusal(str(given))) is not None:
            await context.abort(*refusal)


Role = Literal["scheduler", "trainer", "generator", "agents"]
WEIGHTS_PATH = "/weights"
"""Root of all paths of a server of weights."""

ROLES: Mapping[str, tuple[Role, ...]] = {
    "/streamrl.v1alpha1.Scheduler/Generate": ("generator",),
    "/streamrl.v1alpha1.Scheduler/GetModel": ("generator", "agents"),
    "/streamrl.v1alpha1.Scheduler/Train": ("trainer",),
    "/streamrl.v1alpha1.Scheduler/Agents": ("agents",),
    WEIGHTS_PATH: ("generator", "trainer"),  # its ranks ask each other
}
"""Method, or root of a path -> the roles that have business with it; what is not here is nobody's."""

_URI = re.compile(r"streamrl://([^/]+)/([^/]+)/(?:generator/([^/]+)|([^/]+))")
_SAN = "x509_subject_alternative_name"
"""Key of gRPC's authentication context: every alternative name of the peer's leaf, of whatever kind."""
_MOST_TOLD = 1024
"""Peers whose refusal is remembered as logged; beyond it they are only refused."""

log = logging.getLogger("streamrl.admission")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerIdentity:
    """Who the holder of a leaf is."""

    namespace: str
    job: str
    role: str
    cluster: str = ""
    """Member that a generator is in; empty: the scheduler's own."""

    def __str__(self) -> str:
        return role_uri(self.namespace, self.job, f"{self.role}/{self.cluster}" if self.cluster else self.role)


def parse_identity(uri: str) -> PeerIdentity | None:
    """The identity that a URI names; None: it is none of ours."""
    found = _URI.fullmatch(uri)
    if found is None:
        return None
    namespace, job, cluster, role = found.groups()
    return PeerIdentity(namespace=namespace, job=job, role=role or "generator", cluster=cluster or "")


def identity_in(names: Iterable[str]) -> PeerIdentity | None:
    """Whom a leaf with these alternative names is of; None: it does not name exactly one role."""
    found = [identity for identity in map(parse_identity, names) if identity is not None]
    return found[0] if len(found) == 1 else None


class RoleDoor:
    """Lets in peers that have business with what they call, and belong to the job of `me`."""

    def __init__(self, me: PeerIdentity) -> None:
        self._me = me
        self._told: set[tuple[str, str]] = set()

    def refusal(self, names: Iterable[str], *, method: str, address: str) -> Refusal | None:
        """Why the holder of a leaf with these alternative names is not let in; logged once for each peer."""
        peer = identity_in(names)
        if peer is None:
            code, rule = grpc.StatusCode.UNAUTHENTICATED, "its certificate must name exactly one role of a job"
        elif (peer.namespace, peer.job) != (self._me.namespace, self._me.job):
            code, rule = grpc.StatusCode.PERMISSION_DENIED, f"this is job {self._me.namespace}/{self._me.job}"
        elif peer.role not in (allowed := ROLES.get(method, ())):
            code, rule = grpc.StatusCode.PERMISSION_DENIED, f"{method} is for {' and '.join(allowed) or 'nobody'}"
        else:
            return None
        who = "a peer without a role" if peer is None else str(peer)
        self._tell(who, address=address, text=rule)
        return code, f"{who}: {rule}"

    def _tell(self, who: str, *, address: str, text: str) -> None:
        if (who, address) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add((who, address))
            log.warning("refused %s at %s: %s", who, address, text)


class RoleInterceptor(_Interceptor):
    """Aborts calls that `RoleDoor` refuses."""

    def __init__(self, me: PeerIdentity) -> None:
        self._door = RoleDoor(me)

    async def admit(self, context: Context, method: str) -> None:
        names = [name.decode(errors="replace") for name in context.auth_context().get(_SAN, ())]
        address = context.peer().rpartition(":")[0]  # without the port, another for each connection
        if (refusal := self._door.refusal(names, method=method, address=address)) is not None:
            await context.abort(*refusal)
