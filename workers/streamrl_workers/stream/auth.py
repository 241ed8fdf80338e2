"""Who may speak to a server of this run: holders of the run's token. (With certificates there is none: `roles.py`.)

The token is a secret made for each run, handed to the processes by environment and sent as gRPC
metadata with every call. A server without it in a call answers UNAUTHENTICATED and reads nothing.
Servers of a local run bind to the loopback address only. The token is never logged.
"""

import hmac
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio

from streamrl.keys import GRPC_TOKEN_HEADER
from streamrl_workers.stream.admission import Context, guarded

LOOPBACK = "127.0.0.1"
"""The address that servers of a local run bind to."""

Metadata = tuple[tuple[str, str], ...]


def call_metadata(token: str) -> Metadata:
    """Metadata of every call to a server of the run; a process with certificates may have no token."""
    return ((GRPC_TOKEN_HEADER, token),) if token else ()


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc ships no types
    """Aborts calls that do not carry the run's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Put the check before the handler."""
        handler = await continuation(handler_call_details)
        return None if handler is None else guarded(handler, self._admit)

    async def _admit(self, context: Context) -> None:
        given = dict(context.invocation_metadata() or ()).get(GRPC_TOKEN_HEADER, "")
        if not hmac.compare_digest(str(given).encode(), self._token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call does not carry the token of the run")
