"""The outgoing half of one connection: a queue bounded in bytes, and the loop that writes it out.

Owns the messages between `send` and the transport. Does not own the connection: the servicer does.

Writer loop: consumes the queue; produces messages on the wire; waits for messages (unblocked by
`send` and `end`) and for the peer to read (unblocked by the peer, by `send` overflowing the bound,
by the stall deadline).

Invariants: messages leave in the order of `send`; a peer that does not read loses its connection,
it never holds up the others.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol


class Message(Protocol):
    """A command of the protocol, for either kind of peer."""

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's name
        """Its bytes."""


LIMIT_BYTES = 128 * 2**20
"""Commands that wait for a peer: a trainer's credit and a generator's slots keep far below."""
STALL_S = 60.0
"""A peer that takes nothing for so long is gone."""


class SlowPeerError(RuntimeError):
    """The peer does not read what it is sent."""


class Link:
    """Commands to one peer."""

    def __init__(self, peer: str, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self.peer = peer
        self._limit_bytes = limit_bytes
        self._queue: deque[tuple[int, bytes | Callable[[], bytes]]] = deque()
        self._queued_bytes = 0
        self._ending = False
        self._wake = asyncio.Event()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send(self, message: Message) -> None:
        """Queue a message; what comes after `end` or a break is lost, as the connection is."""
        data = message.SerializeToString()  # once, here: the queue is bounded in bytes
        self._put(len(data), data)

    def send_later(self, size_bytes: int, make: Callable[[], bytes]) -> None:
        """Queue a large message that is made when it is its turn: until then it takes no memory of its own."""
        self._put(size_bytes, make)

    def _put(self, size_bytes: int, item: bytes | Callable[[], bytes]) -> None:
        if self._ending or self._broken.done():
            return
        self._queue.append((size_bytes, item))
        self._queued_bytes += size_bytes
        if self._queued_bytes > self._limit_bytes:
            self._break(f"{self._queued_bytes} bytes wait for it, more than {self._limit_bytes}")
        self._wake.set()

    def end(self) -> None:
        """Close after what is queued."""
        self._ending = True
        self._wake.set()

    async def write_all(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write until `end`.

        Raises:
            SlowPeerError: the peer did not read; the connection is to be closed.
        """
        writer = asyncio.create_task(self._write(write), name=f"write to {self.peer}")
        try:
            await asyncio.wait({writer, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                await self._broken
            await writer
        finally:
            writer.cancel()
            self._queue.clear()
            self._break("its connection is closed")

    async def _write(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            while self._queue:
                size_bytes, item = self._queue.popleft()
                await self._write_one(write, item if isinstance(item, bytes) else item())
                self._queued_bytes -= size_bytes
            if self._ending:
                return
            self._wake.clear()
            await self._wake.wait()  # no deadline: a link may have nothing to say for the whole run

    async def _write_one(self, write: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
        try:
            async with asyncio.timeout(STALL_S):
                await write(data)
        except TimeoutError:
            raise SlowPeerError(f"{self.peer} took nothing for {STALL_S:g} s") from None

    def _break(self, reason: str) -> None:
        if not self._broken.done():
            self._broken.set_exception(SlowPeerError(f"{self.peer} is cut off: {reason}"))
            self._broken.exception()  # seen: nobody may be left to wait for it
