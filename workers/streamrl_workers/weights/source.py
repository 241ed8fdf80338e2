"""What a place gives that has weights: manifests by the name of a version, bytes by their hash. Each transport has one (`transports.py`)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from streamrl.proto import stream_pb2 as pb


class SourceBrokenError(Exception):
    """It broke off, or was not there; to ask again may help. The text says what happened."""


class SourceRefusedError(Exception):
    """It does not give what was asked for, and would not the next time."""


class SourceWaitingError(Exception):
    """It will have it, and has it not yet: the connection goes on."""

    def __init__(self, mark: int) -> None:
        """`mark`: another number than before where something has come to it meanwhile."""
        super().__init__(f"it waits itself, at {mark} bytes")
        self.mark = mark


class NotKeptError(SourceRefusedError):
    """It does not have it, or not any more."""


@dataclass(slots=True, kw_only=True, eq=False)
class Piece:
    """Consecutive bytes of one content that have not arrived, and where they belong."""

    hash: bytes  # of the whole content
    buffer: memoryview  # of the whole content
    begin: int  # moves on as bytes arrive
    end: int


class NotYetError(Exception):
    """A store's word for what it will have later."""

    def __init__(self, mark: int) -> None:
        """`mark`: as in `SourceWaitingError`."""
        super().__init__("it is still on its way")
        self.mark = mark


class ServedStore(Protocol):
    """What a server serves. Its answers may take seconds."""

    def versions(self) -> list[pb.VersionName]:
        """Names of the kept versions."""
        ...

    def pulling(self, version: pb.VersionName) -> AbstractContextManager[pb.Manifest | None]:
        """The manifest of a version, which is kept while inside; None: it is not. Raises NotYetError."""
        ...

    def content(self, content_hash: bytes) -> memoryview | None:
        """The bytes of a hash; None: they are not kept. Raises NotYetError."""
        ...


class Source(Protocol):
    """One stream from such a place. Calls follow each other; one that is cancelled has ended when it raises, and writes no more."""

    async def manifest(self, version: pb.VersionName) -> pb.Manifest:
        """Of a version, which the place keeps until `close`."""
        ...

    async def fetch(self, piece: Piece, *, arrived: Callable[[int], None]) -> None:
        """Fill the piece; `arrived` is told of bytes, in the event loop. After an error the piece has what had arrived."""
        ...

    def abort(self) -> None:
        """The call that is under way ends with SourceBrokenError."""
        ...

    async def close(self) -> None:
        """End the stream."""
        ...
