"""The control connection between rank 0 and one other rank: TCP, framed, with signs of life.

Owns: frames, the reader thread, silence and loss, values and errors as bytes. Does not own: who calls what (`process_group.py`,
`follower.py`), the tensors that ranks exchange (torch.distributed). No torch: ranks know of each other before they load it.

        send(kind, data) ─▶ socket ═════════════════▶ socket ─▶ READER (a thread) ─▶ frames ─▶ receive()
        BEATS (a thread): one byte a second, unless a frame is on its way; finds silence

    reader  consumes: bytes    produces: frames, the time of the last byte    waits for: the peer    unblocked by: `lose`
    beats   consumes: time     produces: a byte, the loss of a silent peer    waits for: a second    unblocked by: `close`

Invariants:
- A peer that is gone (its kernel closed the connection) is lost at once, with or without a wait in progress; one that is silent
  for `silence_s` is lost then. The first reason stays. A lost link raises PeerLostError from every call.
- A frame is sent whole or the link is lost: a beat never gets between the bytes of a frame.
- One frame at a time is unread: calls and answers alternate. What a call has left running ends with a frame of its own, LATER, which waits apart.
- No pickle: what is decoded can only be None, bool, int, float (with inf and nan), str; `array`; lists; dicts with string keys; the
  dataclasses of `packing.py`. As JSON, and behind it the arrays as they lie in memory: both ends run the same machine type and version.
"""

import contextlib
import json
import queue
import socket
import struct
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from streamrl.errors import UserError
from streamrl_workers.trainer.engines import packing
from streamrl_workers.trainer.engines.engine import RetryError

BEAT_S = 1.0
"""Between two signs of life; the shortest silence that a job can ask for is five of them."""
LATE_S = 3 * BEAT_S
"""Who was not heard for so long is to blame when a collective fails."""

_BEAT, _FRAME = b"\x00", b"\x01"
_HEAD = struct.Struct("!BQ")  # kind of frame, bytes of data
_TEXT_BYTES = struct.Struct("!Q")
_MOST_FRAME_BYTES = 2**32
"""More is no frame of ours: a step's samples have some megabytes."""
_READ_BYTES = 2**20
_KIND = "__kind__"
"""Key of an object that stands for an array or a dataclass."""
_MOST_FRAMES = 16
"""Both sides speak in turn, so one or two frames wait at most; a peer that sends on and on is none of ours."""


Payload = Any
"""A value that may cross between ranks, as above."""


class FrameKind(IntEnum):
    """What a frame between ranks means."""

    CALL = 1  # rank 0: [method, payload]
    ANSWER = 2  # the others: what the method returned
    ERROR = 3  # the others: what it raised
    END = 4  # rank 0: done
    LATER = 5  # the others: {"answer"} or {"error"} of what a call has begun (`Ranks.begin`)


class PeerLostError(Exception):
    """The peer is gone or silent; the text names it and says which."""


@dataclass(frozen=True, slots=True)
class LostPeer:
    """Why a peer counts as lost."""

    text: str
    silent: bool = False
    """Nothing was heard of it for long: it hangs, or the way to it is cut, and it may have no end of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One message."""

    kind: int  # a FrameKind
    data: bytes


class RankLink:
    """One connection; takes over the socket."""

    def __init__(
        self, connection: socket.socket, *, peer: str, silence_s: float, on_lost: Callable[[LostPeer], None]
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
        self._later: queue.Queue[Frame | None] = queue.Queue(2 * _MOST_FRAMES)  # frames of kind LATER
        self._beats = self._heard_beat = 0
        """Beats so far, and when the peer was last heard: a time in which this process did not run is no silence of the peer."""
        self._lost: LostPeer | None = None
        self._losing = threading.Lock()
        self._closed = threading.Event()
        self._reader = threading.Thread(target=self._read, name=f"{peer}-reader", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name=f"{peer}-beats", daemon=True).start()

    @property
    def lost(self) -> LostPeer | None:
        """Why the peer counts as lost, or None."""
        return self._lost

    @property
    def silent_s(self) -> float:
        """Since the peer was last heard, in whole beats."""
        return (self._beats - self._heard_beat) * BEAT_S

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

    def receive(self, timeout_s: float | None = None, *, later: bool = False) -> Frame:
        """Return the next frame: of kind LATER, or of the others. Raises PeerLostError; TimeoutError after `timeout_s`, if that is not None."""
        frames = self._later if later else self._frames
        try:
            frame = frames.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"{self.peer} has not answered for {timeout_s:g} s") from None
        if frame is None:
            frames.put(None)  # for whoever asks next
            self._raise_lost()
            raise PeerLostError(f"the link to {self.peer} is closed")
        return frame

    def lose(self, loss: LostPeer) -> None:
        """Give the peer up; every wait on this link ends."""
        with self._losing:
            if self._lost is not None or self._closed.is_set():
                return
            self._lost = loss
        self._shut()
        self._frames.put(None)
        self._later.put(None)
        self._on_lost(loss)

    def farewell(self, kind: int, *, timeout_s: float) -> None:
        """Send the last frame and wait until the peer closes: a connection closed from here could take the frame with it."""
        with self._losing:
            self._closed.set()  # first: the peer may be quicker than we are
        with contextlib.suppress(PeerLostError):
            self.send(kind)
            self._reader.join(timeout_s)
        self.close()

    def close(self) -> None:
        """End the link; it is not lost thereby."""
        with self._losing:
            self._closed.set()
        self._shut()
        self._frames.put(None)
        self._later.put(None)

    def _gone(self) -> None:
        self.lose(LostPeer(f"{self.peer} is gone"))

    def _shut(self) -> None:
        with contextlib.suppress(OSError):  # the peer was first
            self._connection.shutdown(socket.SHUT_RDWR)

    def _raise_lost(self) -> None:
        if self._lost is not None:
            raise PeerLostError(self._lost.text)

    def _read(self) -> None:
        try:
            while True:
                if self._exactly(1) == _FRAME:
                    frame = self._frame()
                    frames = self._later if frame.kind == FrameKind.LATER else self._frames
                    if frames.qsize() >= _MOST_FRAMES:
                        raise ConnectionError("frames that no call asked for")
                    frames.put(frame)
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
            self._heard_beat = self._beats
            data += part
        return data

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S) and self._lost is None:
            self._beats += 1
            if self.silent_s > self._silence_s:
                self.lose(LostPeer(f"{self.peer} is silent for {self._silence_s:g} s", silent=True))
            if self._sending.acquire(blocking=False):  # else a frame is on its way, which is a sign of life too
                try:
                    self._connection.send(_BEAT, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    pass  # the peer does not read: its silence will show
                except OSError:
                    self._gone()
                finally:
                    self._sending.release()


CLASSES: dict[str, type[Any]] = {
    name: found
    for name, found in vars(packing).items()
    if isinstance(found, type) and hasattr(found, "__dataclass_fields__")
}
"""The dataclasses that may cross: all of `packing.py`."""


class MalformedValueError(ValueError):
    """Bytes that no rank of this version wrote."""


def encode(value: Payload) -> bytes:
    """The bytes of `value`; a TypeError for a value of another kind."""
    arrays = bytearray()

    def described(one: Any) -> dict[str, Any]:  # noqa: ANN401 - what JSON does not know
        if isinstance(one, array):
            begin = len(arrays)
            arrays.extend(memoryview(one).cast("B"))
            return {_KIND: "array", "typecode": one.typecode, "begin": begin, "end": len(arrays)}
        name = type(one).__name__
        if CLASSES.get(name) is not type(one):
            raise TypeError(f"a {name} does not cross between ranks")
        return {_KIND: name, **{field.name: getattr(one, field.name) for field in fields(one)}}

    text = json.dumps(value, default=described, separators=(",", ":")).encode()
    return b"".join((_TEXT_BYTES.pack(len(text)), text, arrays))


def decode(data: bytes) -> Payload:
    """The value that `encode` was given. Raises MalformedValueError."""
    try:
        (size,) = _TEXT_BYTES.unpack_from(data)
        text, arrays = data[_TEXT_BYTES.size : _TEXT_BYTES.size + size], memoryview(data)[_TEXT_BYTES.size + size :]

        def restored(found: dict[str, Any]) -> Payload:
            kind = found.pop(_KIND, None)
            if kind is None:
                return found
            if kind != "array":
                return CLASSES[kind](**found)
            one, begin, end = array(found["typecode"]), found["begin"], found["end"]
            one.frombytes(arrays[begin : _within(arrays, begin, end)])
            return one

        return json.loads(text, object_hook=restored)
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise MalformedValueError(f"a message between ranks cannot be read: {error}") from error


def _within(arrays: memoryview, begin: int, end: int) -> int:
    """Return `end`. Raises ValueError: so many bytes are not there."""
    if not 0 <= begin <= end <= len(arrays):
        raise ValueError(f"of {len(arrays)} bytes of arrays {begin} to {end} are named")
    return end


def describe_error(error: BaseException) -> dict[str, Any]:
    """What a rank raises, as a value that travels. The user's errors keep their kind; all else is a fault of that rank."""
    if isinstance(error, UserError):
        return {"kind": "user", "error": error.parts}
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return {"kind": "os", "errno": error.errno, "strerror": error.strerror, "filename": filename}
    return {"kind": "fault", "text": f"{type(error).__name__}: {error}"}


def restore_error(described: dict[str, Any], *, peer: str, what: str) -> Exception:
    """The error again, on rank 0; a fault names `peer` and what it was asked for."""
    if described["kind"] == "user":
        return UserError(**described["error"])
    if described["kind"] == "os":
        return OSError(described["errno"], described["strerror"], described["filename"])
    return RetryError(f"{peer} failed in {what}: {described['text']}")
