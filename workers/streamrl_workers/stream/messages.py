"""Messages of any size over streams of small ones: the only place that splits and joins.

What both ends of a stream say is cut into frames (`Frame` of the protocol) far below what a server reads at once, so no
message is refused by gRPC for its size, and no server ever holds a large message of somebody whom it has not let in.

Owns frames, and the bound of a whole message. Does not own what messages mean.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb

FRAME_BYTES = 256 * 2**10
"""Of a message, in one frame: large enough that framing costs nothing."""
MESSAGE_BYTES = 2**30
"""Largest message, joined: the largest sample that the specification allows fits (`tests/unit/workers/stream/test_messages.py`)."""
ERROR_CHARS = 4096
"""Of an error, in what we say: more helps nobody, and the other side refuses long texts."""
STATES_BYTES = 64 * 2**20
"""Of the states that a trainer names with one step."""
PROMPT_BYTES = 4 * 2**20
"""Longest prompt, in UTF-8: more than any model's context."""

M = TypeVar("M", bound=Message)


_REFUSALS = frozenset(
    {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
"""How a server ends the call of one whom it had let in and whose words it does not take."""


class ProtocolError(ValueError):
    """A peer said what it must not say."""


class RefusedError(RuntimeError):
    """The server does not take what we say. To connect and say it again would not help; the text is its reason."""


def frames(data: bytes) -> Iterator[pb.Frame]:
    """A serialized message in frames.

    Raises:
        UserError: it is beyond `MESSAGE_BYTES`; to send it again would not help.
    """
    if len(data) > MESSAGE_BYTES:
        raise UserError(
            field="message to another process",
            rule=f"must have at most {MESSAGE_BYTES} bytes",
            got=len(data),
            fix="lower maxTokens, maxTurns or the length of prompts",
        )
    for begin in range(0, max(1, len(data)), FRAME_BYTES):
        end = begin + FRAME_BYTES
        yield pb.Frame(data=data[begin:end], more=end < len(data))


class Joiner(Generic[M]):
    """Puts the frames of one direction together."""

    def __init__(self, kind: type[M], *, limit_bytes: int = MESSAGE_BYTES) -> None:
        """`limit_bytes`: of a whole message; it may change between two messages."""
        self.limit_bytes = limit_bytes
        self._kind = kind
        self._data = bytearray()

    def take(self, frame: pb.Frame) -> M | None:
        """The message that `frame` completes, if it does.

        Raises:
            ProtocolError: it is too large, or none of its kind.
        """
        if len(self._data) + len(frame.data) > self.limit_bytes:
            raise ProtocolError(f"a {self._kind.__name__} of more than {self.limit_bytes} bytes")
        if not frame.more and not self._data:
            return self._parsed(frame.data)
        self._data += frame.data
        if frame.more:
            return None
        whole, self._data = bytes(self._data), bytearray()
        return self._parsed(whole)

    async def read(self, call: Any) -> M | None:  # noqa: ANN401 - a streaming call of grpc.aio's client
        """The next message of a client's call; None: the server has ended the stream. Raises as `take`."""
        while (frame := await call.read()) is not grpc.aio.EOF:
            if (message := self.take(frame)) is not None:
                return message
        return None

    async def messages(self, data: AsyncIterator[bytes]) -> AsyncIterator[M | None]:
        """What a server receives, from serialized frames; None for a part of a message: its peer lives.

        Raises:
            ProtocolError: bytes that are no frame, or as `take`.
        """
        async for one in data:
            yield self.take(_decoded(pb.Frame, one))

    def _parsed(self, data: bytes) -> M:
        return _decoded(self._kind, data)


async def read(call: Any, joiner: Joiner[M]) -> M | None:  # noqa: ANN401 - a streaming call of grpc.aio's client
    """The next message of a client's call that was let in; None: the server has ended the stream.

    Raises:
        RefusedError: the server has ended it because of what we said.
        ProtocolError: as `Joiner.take`.
    """
    with _refusals():
        return await joiner.read(call)


async def write(call: Any, message: Message) -> None:  # noqa: ANN401 - a streaming call of grpc.aio's client
    """Send one message over a client's call that was let in.

    Raises:
        RefusedError: as `read`.
        UserError: it is beyond `MESSAGE_BYTES`.
    """
    with _refusals():
        for frame in frames(message.SerializeToString()):
            await call.write(frame)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() in _REFUSALS:
            raise RefusedError(f"{error.code().name}: {error.details()}") from None
        raise


def _decoded(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolError(f"{len(data)} bytes that are no {kind.__name__}") from None
