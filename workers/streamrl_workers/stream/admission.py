"""The door of every gRPC server: who may call is decided before a handler sees the call, and callers can wait for it.

Owns the guard around handlers and what tells a caller that it was let in. Does not own who may call what: `auth.py`
(the run's token), `roles.py` (certificates).

A caller that streams must not write before it was let in: to grpc's client a refusal that meets a write half-way is
INTERNAL, and the reason is lost. So those who were let in are told so by the call's first metadata, and `await_admission`
waits for that. The metadata must leave first for another reason: else the first write sends it, and when that write is
cancelled half-way grpc can send no status after it, and the caller would wait for ever.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

ADMITTED = "streamrl-admitted"
"""Key of the metadata that says so."""

Context = Any
"""grpc.aio.ServicerContext: grpc ships no types."""
Admit = Callable[[Context], Awaitable[None]]
"""Returns, or aborts the call of one who may not make it."""


def guarded(handler: grpc.RpcMethodHandler, admit: Admit) -> grpc.RpcMethodHandler:
    """The same handler behind `admit`."""
    kinds = {
        (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
        (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
        (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
        (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
    }
    make, behaviour = kinds[handler.request_streaming, handler.response_streaming]
    behind = _behind(_telling(admit) if handler.request_streaming else admit, behaviour)
    return make(behind, handler.request_deserializer, handler.response_serializer)


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
