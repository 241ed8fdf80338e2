"""Stalls whose length the test itself measures, and what real processes count meanwhile.

A `HeldLink` stands between two processes. It passes bytes, at once or late; it holds them until it is told; it is cut and mended. Instants are of the
machine's monotonic clock, by which all processes count.
"""

import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from support.metric_pages import families
from support.ports import free_port
from support.runs import wait_for
from support.worker_processes import Workers

TOLERANCE = 0.05
"""Of an injected stall: so much may lie elsewhere."""
STALL_S = 8.0
"""Long enough that a busy machine's delays at both ends are far below the tolerance."""
_PIECE_BYTES = 65_536
_LOOK_S = 0.02


class HeldLink:
    """A port of its own that leads to an address; a thread passes the bytes."""

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.passed_s = 0.0
        """When bytes last went through."""
        self.late_s = 0.0
        """So long each piece is under way."""
        self._target: tuple[str, int] = ("", 0)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._held: dict[socket.socket, tuple[bytes, float]] = {}
        """By who said it: a piece, and when it is due."""
        self._is_held = self._is_cut = self._is_closed = False
        self._held_since_s: float | None = None
        self._thread = threading.Thread(target=self._serve, name="held-link")

    @contextmanager
    def to(self, address: str) -> Iterator["HeldLink"]:
        """As long as the block lasts it leads there."""
        self.lead_to(address)
        self._thread.start()
        try:
            yield self
        finally:
            self._is_closed = True
            self._thread.join()

    def lead_to(self, address: str) -> None:
        """Whoever calls from now on gets there."""
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))

    def hold(self) -> float:
        """Bytes wait from now on. Returns when the first of them has come: that instant."""
        self._held_since_s, self._is_held = None, True
        return float(wait_for(lambda: self._held_since_s, what="bytes to be held"))

    def release(self) -> float:
        """What waits goes on; the instant."""
        self._is_held = False
        return time.monotonic()

    def cut(self) -> float:
        """All connections end, and nobody gets through; the instant."""
        self._is_cut = True
        return time.monotonic()

    def mend(self) -> float:
        """Whoever calls gets through again. Returns when bytes of the other side have: that instant."""
        self.passed_s = 0.0
        self._is_cut = False
        return float(wait_for(lambda: self.passed_s, what="somebody to get through"))

    # ---- in the thread

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready, socket.create_server(("127.0.0.1", self.port)) as door:
            ready.register(door, selectors.EVENT_READ)
            while not self._is_closed:
                self._settle(ready)
                for key, _ in ready.select(_LOOK_S):
                    assert isinstance(key.fileobj, socket.socket)
                    if key.fileobj is door:
                        self._open(door.accept()[0], ready)
                    else:
                        self._read(key.fileobj, ready)
            self._end_all(ready)

    def _settle(self, ready: selectors.BaseSelector) -> None:
        """A cut link ends all; one that is not held passes what is due."""
        if self._is_cut:
            self._end_all(ready)
        due = [one for one, (_, due_s) in self._held.items() if not self._is_held and due_s <= time.monotonic()]
        for source in due:
            if source in self._held:  # its connection has not ended with another's
                piece, _ = self._held.pop(source)
                ready.register(source, selectors.EVENT_READ)
                self._pass(source, piece, ready)

    def _open(self, caller: socket.socket, ready: selectors.BaseSelector) -> None:
        if self._is_cut:
            caller.close()
            return
        try:
            peer = socket.create_connection(self._target)
        except OSError:
            caller.close()
            return
        for source, other in ((caller, peer), (peer, caller)):
            self._peers[source] = other
            ready.register(source, selectors.EVENT_READ)

    def _read(self, source: socket.socket, ready: selectors.BaseSelector) -> None:
        if source not in self._peers:  # its other side has ended in this round
            return
        try:
            piece = source.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        if not piece:
            self._end(source, ready)
        elif self._is_held or self.late_s:
            self._held[source] = piece, time.monotonic() + self.late_s
            self._held_since_s = self._held_since_s or time.monotonic()
            ready.unregister(source)
        else:
            self._pass(source, piece, ready)

    def _pass(self, source: socket.socket, piece: bytes, ready: selectors.BaseSelector) -> None:
        try:
            self._peers[source].sendall(piece)
        except OSError:
            self._end(source, ready)
            return
        self.passed_s = time.monotonic()

    def _end(self, source: socket.socket, ready: selectors.BaseSelector) -> None:
        for one in (source, self._peers[source]):
            self._peers.pop(one)
            if self._held.pop(one, None) is None:
                ready.unregister(one)
            one.close()

    def _end_all(self, ready: selectors.BaseSelector) -> None:
        while self._peers:
            self._end(next(iter(self._peers)), ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What a process has counted up to an instant, in seconds."""

    wall_s: float
    parts: Mapping[str, float]  # `pipeline_` before a cause

    @classmethod
    def of(cls, workers: Workers, process: str) -> "Count":
        """As its page for Prometheus says; the parts add up within 1 %."""
        page = families(workers.page("metrics", process=process).encode())
        (wall_s,) = (one.value for one in page["streamrl_wall_seconds_total"].samples)
        parts = {
            "_".join(filter(None, (one.labels["part"], one.labels["cause"]))): one.value
            for one in page["streamrl_bubble_seconds_total"].samples
        }
        assert abs(sum(parts.values()) - wall_s) <= 0.01 * wall_s, (process, wall_s, parts)
        return cls(wall_s=wall_s, parts=parts)

    def since(self, before: "Count") -> dict[str, float]:
        """Seconds of each part from another instant on."""
        return {part: value - before.parts.get(part, 0.0) for part, value in self.parts.items()}


def hold_on(*, until_s: float) -> None:
    """Let a stall last: the test's only way of letting time go by."""
    wait_for(lambda: time.monotonic() >= until_s, what="the stall's length")
