"""The bound of what is read from a socket."""

import io
import socket
from time import monotonic

import pytest

from streamrl_pages.http_fetch import BoundedReader, OversizeError

MOST_BYTES = 2**16


def test_what_is_read_ahead_of_a_head_in_two_parts_is_within_its_bound() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        raw = BoundedReader(ours, until_s=monotonic() + 60, most_bytes=MOST_BYTES)
        reader = io.BufferedReader(raw, MOST_BYTES)
        theirs.sendall(b"HTTP/1.1 200 OK\r\n")
        assert reader.readline() == b"HTTP/1.1 200 OK\r\n"
        theirs.sendall(b"\r\n" + b"x" * MOST_BYTES)
        assert reader.readline() == b"\r\n"
        raw.allow(MOST_BYTES)
        assert reader.read(MOST_BYTES) == b"x" * MOST_BYTES
        theirs.sendall(b"x" * MOST_BYTES)
        with pytest.raises(OversizeError, match=f"more than {2 * MOST_BYTES} bytes"):
            reader.read(MOST_BYTES)
