"""The control connection between rank 0 and one other rank: TCP, framed, with signs of life.

Owns: frames, the reader thread, silence and loss. Does not own: what frames mean (`linked_ranks.py`, `follower.py`), the
tensors that ranks exchange (torch.distributed). No torch: ranks know of each other before they load it.

        send(kind, data) ─▶ socket ═════════════════▶ socket ─▶ READER (a thread) ─▶ frames ─▶ receive()
        BEATS (a thread): one byte a second, unless a frame is on its way; finds silence

    reader  consumes: bytes    produces: frames, the time of the last byte    waits for: the peer    unblocked by: `lose`
    beats   consumes: time     produces: a byte, the loss of a silent peer    waits for: a second    unblocked by: `close`

Invariants:
- A peer that is gone (its kernel closed the connection) is lost at once, with or without a wait in progress; one that is silent
  for `silence_s` is lost then. The first reason stays. A lost link raises LostError from every call.
- A frame is sent whole or the link is lost: a beat never gets between the bytes of a frame.
- One frame at a time is unread: calls and answers alternate.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 1.0
"""Between two signs of life; the shortest silence that a job can ask for is five of them."""
LATE_S = 3 * BEAT_S
"""Who was not heard for so long is to blame when a collective fails."""

_BEAT, _FRAME = b"\x00", b"\x01"
_HEAD = struct.Struct("!BQ")  # kind of frame, bytes of data
_MOST_FRAME_BYTES = 2**32
"""More is no frame of ours: a step's samples have some megabytes."""
_READ_BYTES = 2**20
_MOST_FRAMES = 16
"""Both sides speak in turn, so one or two frames wait at most; a peer that sends on and on is none of ours."""


class LostError(Exception):
    """The peer is gone or silent; the text names it and says which."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Why a peer counts as lost."""

    text: str
    silent: bool = False
    """Nothing was heard of it for long: it hangs, or the way to it is cut, and it may have no end of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message."""

    kind: int  # its meaning belongs to the users of the link
    data: bytes


class Link:
    """One connection; takes over the socket."""

    def __init__(
        self, connection: socket.socket, *, peer: str, silence_s: float, on_lost: Callable[[Loss], None]
    ) -> None:
        """`peer` names the other side ("rank 1"); `on_lost` is called once, from a thread of the link, with the reason."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._connection = connection
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._sending = threading.Lock()
        self._frames: queue.Queue[Frame | None] = queue.Queue(2 * _MOST_FRAMES)  # the ends of the link fit in, too
        self._heard_s = time.monotonic()
        self._lost: Loss | None = None
        self._losing = threading.Lock()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"{peer}-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name=f"{peer}-beats", daemon=True).start()

    @property
    def lost(self) -> Loss | None:
        """Why the peer counts as lost, or None."""
        return self._lost

    @property
    def unread(self) -> bool:
        """Whether `receive` has something to give, or to raise, at once."""
        return not self._frames.empty()

    @property
    def silent_s(self) -> float:
        """Since the peer was last heard."""
        return time.monotonic() - self._heard_s

    def send(self, kind: int, data: bytes = b"") -> None:
        """Send one frame. It blocks while the peer does not read, until it is lost."""
        with self._sending:
            self._raise_lost()
            try:
                self._connection.sendall(_FRAME + _HEAD.pack(kind, len(data)))
                self._connection.sendall(data)
            except OSError:
                self._gone()
        self._raise_lost()

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next frame; None: wait until the peer is lost. Raises LostError; TimeoutError after `timeout_s`."""
        try:
            frame = self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self.peer} has not answered for {timeout_s:g} s") from None
        if frame is None:
            self._frames.put(None)  # for whoever asks next
            self._raise_lost()
            raise LostError(f"the link to {self.peer} is closed")
        return frame

    def lose(self, loss: Loss) -> None:
        """Give the peer up; every wait on this link ends."""
        with self._losing:
            if self._lost is not None or self._closed.is_set():
                return
            self._lost = loss
        self._shut()
        self._frames.put(None)
        self._on_lost(loss)

    def farewell(self, kind: int, *, timeout_s: float) -> None:
        """Send the last frame and wait until the peer closes: a connection closed from here could take the frame with it."""
        with self._losing:
            self._closed.set()  # first: the peer may be quicker than we are
        with contextlib.suppress(LostError):
            self.send(kind)
            self._reader.join(timeout_s)
        self.close()

    def close(self) -> None:
        """End the link; it is not lost thereby."""
        with self._losing:
            self._closed.set()
        self._shut()
        self._frames.put(None)

    def _gone(self) -> None:
        self.lose(Loss(f"{self.peer} is gone"))

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the peer was first
            self._connection.shutdown(socket.SHUT_RDWR)

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise LostError(self._lost.text)

    def _read(self) -> None:
        try:
            while True:
                if self._exactly(1) == _FRAME:
                    if self._frames.qsize() >= _MOST_FRAMES:
                        raise ConnectionError("frames that nobody asked for")
                    self._frames.put(self._frame())
        except OSError:
            self._gone()
        finally:
            self._connection.close()

    def _frame(self) -> Frame:
        kind, size = _HEAD.unpack(self._exactly(_HEAD.size))
        if size > _MOST_FRAME_BYTES:
            raise ConnectionError(f"a frame of {size} bytes")
        return Frame(kind=kind, data=bytes(self._exactly(size)))

    def _exactly(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(min(_READ_BYTES, size - len(data)))
            if not part:
                raise ConnectionError("end of file")
            self._heard_s = time.monotonic()
            data += part
        return data

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S) and self._lost is None:
            if self.silent_s > self._silence_s:
                self.lose(Loss(f"{self.peer} is silent for {self._silence_s:g} s", silent=True))
            if self._sending.acquire(blocking=False):  # else a frame is on its way, which is a sign of life too
                try:
                    self._connection.send(_BEAT, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # the peer does not read: its silence will show
                except OSError:
                    self._gone()
                finally:
                    self._sending.release()
