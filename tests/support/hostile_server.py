"""A server that answers with bytes as a test wants them: endless, packed, slow, or of another shape than HTTP's own libraries allow."""

import asyncio
import functools
import gzip
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_CHUNK = b"x" * 2**16


def head(status: int, *, kind: str = "application/json", more: str = "") -> bytes:
    """Status line and headers of a body that ends with the connection."""
    return f"HTTP/1.1 {status} Because\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}\r\n".encode()


async def _drained(writer: asyncio.StreamWriter) -> None:
    """Wait until it is taken; raise if nobody takes it any more, which a connection with TLS learns in the next round of the loop."""
    await writer.drain()
    await asyncio.sleep(0)


async def endless(writer: asyncio.StreamWriter, status: int, *, begin: bytes = b"", part: bytes = _CHUNK) -> None:
    """A body without end."""
    writer.write(head(status) + begin)
    while True:
        writer.write(part)
        await _drained(writer)


async def bomb(writer: asyncio.StreamWriter, status: int, *, encoding: str) -> None:
    """A body without end that is packed a thousand times."""
    pack = zlib.compressobj(wbits=31 if encoding == "gzip" else 15)
    begin, again = (pack.compress(bytes(2**24)) + pack.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    writer.write(head(status, more=f"Content-Encoding: {encoding}\r\n") + begin)
    while True:
        writer.write(again)
        await _drained(writer)


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    """Headers without end."""
    writer.write(b"HTTP/1.1 200 Fine\r\n")
    while True:
        writer.write(b"X-More: " + _CHUNK[:4000] + b"\r\n")
        await _drained(writer)


@functools.cache
def packed_twice(size_bytes: int) -> bytes:
    """So many bytes, packed by gzip and packed again: a millionth remains."""
    return gzip.compress(gzip.compress(bytes(size_bytes), compresslevel=1))


async def again(writer: asyncio.StreamWriter, begin: bytes, part: bytes) -> None:
    """The same without end, as fast as it is taken."""
    writer.write(begin)
    while True:
        writer.write(part)
        await _drained(writer)


async def drip(writer: asyncio.StreamWriter, status: int, *, begin: bytes | None = None, part: bytes = b" ") -> None:
    """A byte now and then."""
    writer.write(head(status) if begin is None else begin)
    while True:
        writer.write(part)
        await _drained(writer)
        await asyncio.sleep(0.05)


def whole(status: int, body: bytes, *, more: str = "") -> bytes:
    """An answer at once."""
    return head(status, more=f"Content-Length: {len(body)}\r\n{more}") + body


@asynccontextmanager
async def serve(
    answer: Callable[[str, asyncio.StreamWriter], object], *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Answers each request by `answer(first line, writer)`; gives the address."""

    calls: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.add(asyncio.current_task())
        try:
            asked = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next((line for line in asked.splitlines() if line.lower().startswith("content-length:")), ":0")
            await reader.readexactly(int(length.partition(":")[2]))
            told = answer(asked.partition("\r\n")[0], writer)
            if asyncio.iscoroutine(told):
                await told
            writer.close()
            await writer.wait_closed()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for _ in range(10):  # a connection that was taken just now gets its handler
            await asyncio.sleep(0)
        for call in calls:  # an answer without end, or one that nobody has read
            call.cancel()
        await asyncio.gather(*calls)
        await asyncio.sleep(0)  # connections that are aborted close in the next round of the loop
