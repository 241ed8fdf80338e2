"""The program between two network namespaces: what one TUN device sends comes out of the other later, slower, or not at all.

    python delay_line.py SOCKET  PID ADDRESS  PID ADDRESS  SHAPE

Owns a device `wan` in the namespace of each process PID, with both addresses; they go when it ends. `Line` is one direction
and knows no clock. Runs as a plain file: imports nothing but the standard library.

Consumes: packets of both devices; a JSON object of `Shape`'s fields to change, on each connection to SOCKET. Produces: packets;
to each connection the shape and the counters (null goes back to SHAPE). Waits for: a packet, a connection, the time when a packet is due. Unblocked by: signals.
"""

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

DEVICE = "wan"
MTU = 9000
"""Jumbo frames: a sixth of the packets, so that the line carries hundreds of Mbit/s on a part of a core."""
_BATCH = 64
"""Packets that are read at once: the other direction waits no longer than that."""
_LONGEST_REQUEST = 65536
_REQUEST_S = 5.0
_TUNSETIFF, _TUN, _PLAIN = 0x400454CA, 0x0001, 0x1000
_NETWORK = 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the line does to the packets of each direction."""

    delay_s: float = 0.0
    """One way: half of the round trip."""
    rate_bps: float | None = None
    """Bits per second; None = as fast as they come."""
    loss: float = 0.0
    """Share of packets that are lost, each by itself."""
    late: float = 0.0
    """Share of packets that come `late_s` later than they should: those after them overtake them."""
    late_s: float = 0.03
    twice: float = 0.0
    """Share of packets that come out twice."""
    cut: bool = False
    """Nothing passes, and nobody is told."""
    buffer_s: float = 0.1
    """At `rate_bps`: a packet that would wait longer for its turn is dropped."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Counters of one direction, from the start."""

    packets: int = 0
    bytes: int = 0
    """Whole IP packets that came out."""
    lost: int = 0
    """Packets, by loss and by cuts."""
    overflowed: int = 0
    """Packets, by a full buffer."""


class Line:
    """One direction: first in, first out, but for packets that are late."""

    def __init__(self, shape: Shape, *, draw: Callable[[], float]) -> None:
        self.traffic = Traffic()
        self._shape = shape
        self._draw = draw
        self._free_at = 0.0
        """When the last packet will have been put on the line."""
        self._newest_due = 0.0
        self._count = itertools.count()
        self._flight: list[tuple[float, int, bytes]] = []
        """A heap; of packets that are due at the same time the first goes first."""

    def reshape(self, shape: Shape) -> None:
        """What is on the line is lost with a cut, and else comes out as it would have."""
        self._shape = shape
        if shape.cut:
            self.traffic.lost += len(self._flight)
            self._flight.clear()
            self._free_at = self._newest_due = 0.0

    def offer(self, now: float, packet: bytes) -> None:
        """A packet goes in."""
        shape = self._shape
        if shape.cut or self._is_drawn(shape.loss):
            self.traffic.lost += 1
            return
        turn = max(now, self._free_at)
        if shape.rate_bps is not None:
            if turn - now > shape.buffer_s:
                self.traffic.overflowed += 1
                return
            turn += len(packet) * 8 / shape.rate_bps
        self._free_at = turn
        self._newest_due = due = max(turn + shape.delay_s, self._newest_due)
        for _ in range(1 + self._is_drawn(shape.twice)):
            late_s = shape.late_s if self._is_drawn(shape.late) else 0.0
            heapq.heappush(self._flight, (due + late_s, next(self._count), packet))

    def _is_drawn(self, share: float) -> bool:
        return bool(share) and self._draw() < share

    def due(self, now: float) -> Iterator[bytes]:
        """Packets that come out by now."""
        while self._flight and self._flight[0][0] <= now:
            packet = heapq.heappop(self._flight)[2]
            self.traffic.packets += 1
            self.traffic.bytes += len(packet)
            yield packet

    @property
    def next_due(self) -> float | None:
        """When the next packet comes out."""
        return self._flight[0][0] if self._flight else None


class DelayLine:
    """Both directions between two devices."""

    def __init__(self, devices: Sequence[int], shape: Shape, *, clock: Callable[[], float]) -> None:
        self._first = self._shape = shape
        self._clock = clock
        self._lines = [Line(shape, draw=random.random) for _ in devices]
        self._outlets = list(zip(self._lines, reversed(devices), strict=True))

    def read(self, side: int, device: int) -> None:
        """Take what a device has."""
        for _ in range(_BATCH):
            try:
                packet = os.read(device, MTU)
            except BlockingIOError:
                return
            self._lines[side].offer(self._clock(), packet)

    def write(self) -> float | None:
        """Give out what is due; return the seconds until the next packet."""
        now = self._clock()
        for line, outlet in self._outlets:
            for packet in line.due(now):
                with contextlib.suppress(OSError):  # the device's namespace is just ending
                    os.write(outlet, packet)
        waiting = [line.next_due for line in self._lines if line.next_due is not None]
        return max(0.0, min(waiting) - self._clock()) if waiting else None

    def answer(self, listener: socket.socket) -> None:
        """Serve one connection: change what it names, or go back to the first shape (null); tell how it is now."""
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(_REQUEST_S)
            try:
                wanted: dict[str, Any] | None = json.loads(connection.recv(_LONGEST_REQUEST))
                self._shape = self._first if wanted is None else replace(self._shape, **wanted)
                for line in self._lines:
                    line.reshape(self._shape)
                told = {"shape": asdict(self._shape), "traffic": [asdict(line.traffic) for line in self._lines]}
                connection.sendall(json.dumps(told).encode())
            except (OSError, ValueError, TypeError) as error:
                sys.stderr.write(f"request refused: {error}\n")


def open_device(pid: str, ours: str, theirs: str) -> int:
    """Make the device in the network namespace of a process, reaching the other end's address by it."""
    with Path(f"/proc/{pid}/ns/net").open("rb") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"setns to the network of process {pid}")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN | _PLAIN))
    for words in (
        ("link", "set", DEVICE, "mtu", str(MTU), "addrgenmode", "none"),  # no IPv6: only what is sent is counted
        ("address", "add", ours, "peer", theirs, "dev", DEVICE),
        ("link", "set", DEVICE, "up"),
    ):
        subprocess.run(["ip", *words], check=True, timeout=20)
    return device


def main(path: str, ends: Sequence[str], shape: Shape) -> None:
    """Carry packets until a signal."""
    with contextlib.suppress(PermissionError):
        os.nice(-20)  # on a busy machine the line would else be slower than it says
    first, first_address, second, second_address = ends
    devices = [open_device(first, first_address, second_address), open_device(second, second_address, first_address)]
    line = DelayLine(devices, shape, clock=time.monotonic)
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ, lambda: line.answer(listener))
        for side, device in enumerate(devices):
            selector.register(device, selectors.EVENT_READ, lambda side=side, device=device: line.read(side, device))
        while True:
            for key, _ in selector.select(line.write()):
                key.data()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:6], Shape(**json.loads(sys.argv[6])))
