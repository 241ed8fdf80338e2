"""What the connections of generators and of the trainer have in common: greeting, two loops, one end.

Owns the course of a connection. Does not own what events mean (`service.py`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol

import grpc
import grpc.aio

from streamrl_workers.scheduler.shell.ending import EndingBox
from streamrl_workers.scheduler.shell.link import Link, SlowPeerError
from streamrl_workers.scheduler.shell.loops import report
from streamrl_workers.stream.admission import Context

HELLO_TIMEOUT_S = 10.0
"""A connection that does not say who it is for so long is closed."""

log = logging.getLogger("streamrl.scheduler")

Events = AsyncIterator[Any]
"""The peer's events."""
Handlers = Mapping[str, Callable[[Any], None]]
"""Kind of event -> what it does."""


class ProtocolError(ValueError):
    """A peer said what it must not say at this point."""


class Peer(Protocol):
    """One side's part of a connection."""

    link: Link

    def join(self) -> bool:
        """Say hello to the core; False if the peer was told to stop instead."""

    def leave(self, reason: str) -> None:
        """Say good-bye to the core, unless a newer connection has taken over."""

    async def take(self, event: Any) -> None:  # noqa: ANN401 - either direction's event
        """Handle one event."""


async def greeting(events: Events, context: Context, *, kind: str) -> Any:  # noqa: ANN401 - either hello
    """The first message, which must be a hello."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            event = await anext(events, None)
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no hello of the {kind} within {HELLO_TIMEOUT_S:g} s")
        raise
    if event is None or event.WhichOneof("event") != "hello":
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the first message of a {kind} must be its hello")
        raise ProtocolError(kind)
    return event.hello


async def serve_peer(peer: Peer, events: Events, *, context: Context, ending: EndingBox) -> None:
    """Run a connection from its join to its end."""
    reason = "its connection is closed"
    try:
        if not peer.join():
            await peer.link.write_all(context.write)
            return
        await _both(_read(peer, events), peer.link.write_all(context.write))
    except (SlowPeerError, ProtocolError) as error:
        reason = str(error)
        log.warning("%s is disconnected: %s", peer.link.peer, reason)
        await context.abort(grpc.StatusCode.ABORTED, reason)
    except Exception as error:
        if not is_lost_connection(error):
            report(error, ending=ending)  # grpc would only log it
            raise
    finally:
        _leave(peer, reason, ending=ending)


def _leave(peer: Peer, reason: str, *, ending: EndingBox) -> None:
    try:
        peer.leave(reason)
    except Exception as error:
        report(error, ending=ending)
        raise


def is_lost_connection(error: Exception) -> bool:
    """Whether grpc says that the peer is gone: it has no public type for that on the server's side."""
    return isinstance(error, grpc.RpcError) or type(error).__module__.startswith("grpc.")


def dispatch(event: Any, handlers: Handlers) -> None:  # noqa: ANN401 - either direction's event
    """Hand an event to its handler."""
    kind = event.WhichOneof("event")
    if kind == "hello":
        raise ProtocolError("it said hello twice")
    if kind is not None:  # None: an event of a newer protocol, which we may leave aside
        handlers[kind](getattr(event, kind))


async def _read(peer: Peer, events: Events) -> None:
    async for event in events:
        await peer.take(event)


async def _both(read: Coroutine[Any, Any, None], write: Coroutine[Any, Any, None]) -> None:
    """Run the two loops of a connection until one ends; the other one is ended with it."""
    tasks = [asyncio.create_task(read, name="connection reader"), asyncio.create_task(write, name="connection writer")]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
