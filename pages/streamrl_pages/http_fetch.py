"""What every HTTP client of ours keeps to, and the one client of the standard library, for pages of our own processes.

Owns: bounds of what is read, in bytes and in time; what `Retry-After` and `Content-Encoding` of an answer mean. Does not own the clients that wait
in an event loop (`streamrl_pages.http_client`), nor what an answer says.

Invariants, of both clients:
- One deadline holds for connection, headers and body together: an answer that arrives byte by byte ends with it.
- Headers and body have each a bound, counted as they arrive. Encoded answers are refused, since decoding would grow them after that.
- Redirects are answers like any other: none is followed, so no token goes elsewhere.
"""

import datetime
import email.utils
import io
import socket
from http.client import HTTPException, HTTPResponse
from time import monotonic
from typing import cast

from streamrl.errors import shorten

MOST_HEAD_BYTES = 2**16
"""Maximum size of status line and headers."""
MOST_RETRY_AFTER_S = 3600.0
"""Maximum wait that an answer can ask for."""
_MOST_ERROR_CHARS = 300
_CHUNK_BYTES = 2**16
_OK = 200


class FetchError(Exception):
    """Failure to get a page; the text names its address and the cause, in one line."""


class OversizeError(Exception):
    """Answer with more bytes than its reader takes; the rest is not read, and the connection is closed."""


def one_line(error: BaseException) -> str:
    """Return type and text of an error, shortened: libraries quote what a server has sent, up to 100 kB of it."""
    text = " ".join(str(error).split())[:_MOST_ERROR_CHARS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def encoding_problem(content_encoding: str | None) -> str | None:
    """Return what is wrong with an answer that has this `Content-Encoding`; None: it is sent as it is."""
    if content_encoding is None or content_encoding.strip().lower() in ("", "identity"):
        return None
    return f"it is encoded as {shorten(content_encoding)}, which was not asked for"


def retry_after_s(text: str | None) -> float | None:
    """Return the wait that a header `Retry-After` asks for, up to `MOST_RETRY_AFTER_S`; None if it names neither seconds nor a date (RFC 9110, 10.2.3)."""
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return min(float(text), MOST_RETRY_AFTER_S)
    try:
        date = email.utils.parsedate_to_datetime(text)
        if date.tzinfo is None:
            date = date.replace(tzinfo=datetime.UTC)
        left_s = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
    except (ValueError, OverflowError):  # no date, or one that no calendar has
        return None
    return min(max(0.0, left_s), MOST_RETRY_AFTER_S)


class BoundedReader(io.RawIOBase):
    """Reads from a socket up to a deadline and a number of bytes. Afterwards the socket's timeout is another one."""

    def __init__(self, connection: socket.socket, *, until_s: float, most_bytes: int) -> None:
        """`until_s`: by the monotonic clock."""
        self._connection = connection
        self._file = connection.makefile("rb", buffering=0)  # keeps the socket open, as files of sockets do
        self._until_s = until_s
        self._most_bytes = self._left_bytes = most_bytes

    def readable(self) -> bool:
        """Return True, as for any reader."""
        return True

    def allow(self, more_bytes: int) -> None:
        """Take more bytes than was said."""
        self._left_bytes += more_bytes
        self._most_bytes += more_bytes

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override] # typeshed's Buffer has no length
        """Receive what has arrived, as far as it may: reading ahead takes no more. Raises `TimeoutError` and `OversizeError`."""
        left_s = self._until_s - monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left_s)
        count = self._file.readinto(memoryview(buffer)[: max(1, self._left_bytes)]) or 0
        self._left_bytes -= count
        if self._left_bytes < 0:
            raise OversizeError(f"it has more than {self._most_bytes} bytes")
        return count

    def close(self) -> None:
        """Let go of the socket."""
        self._file.close()
        super().close()


class _SocketFile:
    """The one method of a socket that a response of the standard library calls."""

    def __init__(self, reader: BoundedReader) -> None:
        self._reader = reader

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self._reader, _CHUNK_BYTES)


def fetch(address: str, path: str, *, timeout_s: float, most_bytes: int) -> bytes:
    """Return a page over plain HTTP. Proxies of the environment are not used: they are for the world outside.

    Args:
        address: host:port.
        path: of the page, from its slash on.
        timeout_s: for the connection and the whole answer.
        most_bytes: of the body.

    Raises:
        FetchError: there is no such page, or none within the bounds.
    """
    until_s = monotonic() + timeout_s
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connection:
            asked = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
            connection.sendall(asked.encode("ascii"))
            return _answer(BoundedReader(connection, until_s=until_s, most_bytes=MOST_HEAD_BYTES), most_bytes)
    except TimeoutError:
        raise FetchError(f"http://{address}{path}: no whole answer within {timeout_s:g} s") from None
    except (OSError, ValueError, HTTPException, OversizeError) as error:
        raise FetchError(f"http://{address}{path}: {shorten(str(error) or type(error).__name__)}") from error


def _answer(reader: BoundedReader, most_bytes: int) -> bytes:
    response = HTTPResponse(cast(socket.socket, _SocketFile(reader)), method="GET")
    with response:
        response.begin()
        if response.status != _OK:
            raise ValueError(f"it answers with status {response.status}")
        if problem := encoding_problem(response.getheader("Content-Encoding")):
            raise ValueError(problem)
        lengths = response.headers.get_all("Content-Length", [])
        if len(lengths) > 1 or not all(text.isascii() and text.isdigit() for text in lengths):
            raise ValueError(f"its length is {shorten(', '.join(lengths))}")
        if response.length is not None and response.length > most_bytes:
            raise OversizeError(f"it has {response.length} bytes, more than {most_bytes}")
        reader.allow(most_bytes)
        body = bytearray()
        while part := response.read1(_CHUNK_BYTES):
            body += part
        if response.length:
            raise ValueError(f"it ended {response.length} bytes too early")
        return bytes(body)
