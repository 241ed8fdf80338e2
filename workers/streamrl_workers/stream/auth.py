"""Who may speak to a server of this run: holders of the run's token. (With certificates there is none: `roles.py`.)

The token is a secret made for each run, handed to the processes by environment and sent as gRPC
metadata with every call. A server without it in a call answers UNAUTHENTICATED and reads nothing.
Servers of a local run bind to the loopback address only. The token is never logged.
"""

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from streamrl.keys import GRPC_TOKEN_HEADER

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
        """Hand the call on, or replace its handler by one that refuses."""
        handler = await continuation(handler_call_details)
        if handler is None or self._holds_token(handler_call_details.invocation_metadata):
            return handler
        return _refusing(handler)

    def _holds_token(self, metadata: Metadata | None) -> bool:
        given = dict(metadata or ()).get(GRPC_TOKEN_HEADER, "")
        return hmac.compare_digest(str(given).encode(), self._token)


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same shape as `handler` that aborts at once."""
    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, _refuse),
        (False, True): (grpc.unary_stream_rpc_method_handler, _refuse_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, _refuse),
        (True, True): (grpc.stream_stream_rpc_method_handler, _refuse_stream),
    }
    make, refuse = kinds[handler.request_streaming, handler.response_streaming]
    return make(refuse)


async def _refuse(_request: Any, context: grpc.aio.ServicerContext) -> None:  # noqa: ANN401 - any method's message
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this call does not carry the token of the run")


async def _refuse_stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:  # noqa: ANN401
    await _refuse(request, context)
    yield b""
