"""Files of a model without its weights: which ones go, in pieces over a stream, checked on arrival, fetched by generators.

Everything that says how the model is built and how text becomes tokens goes; weights do not: those are pulled
(`weights/pull.py`). Owns the rules that both ends share, and the fetching end: reconnecting, the deadline, the folder in
the run folder, which is whole or not there. Does not own the sending end (`scheduler/server/service.py`).
"""

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import grpc
import grpc.aio

from streamrl.errors import UserError
from streamrl.keys import DIR_MODEL_FILES
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.auth import call_metadata
from streamrl_workers.stream.channel import (
    SCHEDULER,
    Backoff,
    ConnectTimeoutError,
    SchedulerLostError,
    client,
    connect,
    refusal_of,
)
from streamrl_workers.stream.scheduler_link import SchedulerAddress

WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.index.json", "*.gguf", "*.onnx", "*.h5", "*.msgpack"),
)
"""Names of files that stay: weights in any format, and their indexes."""
MOST_FILES = 256
MOST_FILE_BYTES = 256 * 2**20
MOST_BYTES = 512 * 2**20
"""Large vocabularies take some ten megabytes; what is above these bounds is no configuration."""
_PIECE_BYTES = 2**20
_HASH_BYTES = 16
TIMEOUT_S = 1800.0
"""The scheduler's pod may have to be placed, its image pulled, the model downloaded or warmed up first."""
_CONNECT_TIMEOUT_S = 5.0
_STALL_TIMEOUT_S = 30.0
"""Without a piece for so long, the connection is given up and made anew."""
_LONGEST_PAUSE_S = 5.0
_TELL_S = 30.0
"""Between two lines in the log about what is awaited."""

_log = logging.getLogger(__name__)


class ModelFilesError(ValueError):
    """A file cannot be handed over, or is not what was sent; the text names it."""


def model_files(directory: Path) -> list[Path]:
    """The files that go, by name. Hidden ones are somebody's cache.

    Raises:
        ModelFilesError: the directory is none, or its files are beyond the bounds.
    """
    if not directory.is_dir():
        raise ModelFilesError(f"{directory} is no directory with a model")
    found = [path for path in sorted(directory.rglob("*")) if path.is_file() and _goes(path.relative_to(directory))]
    if len(found) > MOST_FILES:
        raise ModelFilesError(f"{directory} has {len(found)} files beside weights, at most {MOST_FILES} are handed out")
    total_bytes = 0
    for path in found:
        size_bytes = path.stat().st_size
        total_bytes += size_bytes
        if size_bytes > MOST_FILE_BYTES or total_bytes > MOST_BYTES:
            raise ModelFilesError(f"{path} is too large to be configuration or tokenizer ({size_bytes} bytes)")
    return found


def _goes(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts) and not any(path.match(rule) for rule in WEIGHTS)


def pieces(path: Path, *, directory: Path) -> Iterator[pb.ModelFile]:
    """One file."""
    data = path.read_bytes()
    name, digest = path.relative_to(directory).as_posix(), _digest(data)
    for begin in range(0, max(len(data), 1), _PIECE_BYTES):
        yield pb.ModelFile(name=name, size_bytes=len(data), hash=digest, data=data[begin : begin + _PIECE_BYTES])


class Arriving:
    """Puts pieces together, below one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._piece: pb.ModelFile | None = None
        """The first one of the file that is arriving."""
        self._data = bytearray()
        self._total_bytes = 0
        self.names: list[str] = []
        """Of the files that are whole."""

    def take(self, piece: pb.ModelFile) -> None:
        """The next piece; the last one of a file writes it.

        Raises:
            ModelFilesError: it is not what was announced, or beyond the bounds.
        """
        self._total_bytes += len(piece.data)
        if self._piece is None:
            self._piece = piece
        if (piece.name, piece.size_bytes, piece.hash) != (
            self._piece.name,
            self._piece.size_bytes,
            self._piece.hash,
        ):
            raise ModelFilesError(f"{piece.name} came before {self._piece.name} was whole")
        self._data += piece.data
        if piece.size_bytes > MOST_FILE_BYTES or self._total_bytes > MOST_BYTES or len(self.names) >= MOST_FILES:
            raise ModelFilesError(f"{piece.name}: more than a model's configuration and tokenizer may have")
        if len(self._data) >= piece.size_bytes:
            self._write(piece)

    def end(self) -> None:
        """The stream has ended well: no file may be half there.

        Raises:
            ModelFilesError: one is, or there is none at all.
        """
        if self._piece is not None:
            raise ModelFilesError(f"{self._piece.name} ended after {len(self._data)} of {self._piece.size_bytes} bytes")
        if not self.names:
            raise ModelFilesError("the model has no files")

    def _write(self, piece: pb.ModelFile) -> None:
        if len(self._data) != piece.size_bytes or _digest(self._data) != piece.hash:
            raise ModelFilesError(f"{piece.name} is not what was announced: its size or its hash differ")
        path = self._directory / _safe(piece.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self._data)
        self.names.append(piece.name)
        self._piece = None
        self._data = bytearray()


def _safe(name: str) -> PurePosixPath:
    """A path that stays below its directory."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ModelFilesError(f"{name!r} is no relative path of a file")
    return path


def _digest(data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


async def fetch_model(source: SchedulerAddress, *, run_dir: Path) -> Path:
    """The directory with the files.

    Raises:
        SchedulerLostError: not had in time.
        UserError: the scheduler refuses us, or has no model that can be handed out.
    """
    loop = asyncio.get_running_loop()
    begun_s = told_s = loop.time()
    told = ""
    backoff = Backoff(limit_s=_LONGEST_PAUSE_S)
    while True:
        try:
            return await _attempt(source, run_dir=run_dir)
        except (ConnectTimeoutError, grpc.aio.AioRpcError, ModelFilesError, TimeoutError) as error:
            reason = _judge(error, source)
        waited_s = loop.time() - begun_s
        if waited_s >= TIMEOUT_S:
            raise SchedulerLostError(f"waited {waited_s:.0f} s in vain for the model's files: {reason}")
        if reason != told or loop.time() - told_s >= _TELL_S:
            told, told_s = reason, loop.time()
            _log.info("waiting for the model's files of the scheduler at %s: %s", source.scheduler, reason)
        await backoff.pause()


async def _attempt(source: SchedulerAddress, *, run_dir: Path) -> Path:
    channel = await connect(source.scheduler, timeout_s=_CONNECT_TIMEOUT_S, who="the scheduler", tls=source.tls)
    directory = run_dir / DIR_MODEL_FILES
    partial = directory.with_name(f".partial-{directory.name}")
    async with channel:
        shutil.rmtree(partial, ignore_errors=True)
        arriving = Arriving(partial)
        call = client(channel, SCHEDULER).GetModel(pb.ModelRequest(), metadata=call_metadata(source.token))
        try:
            while True:
                async with asyncio.timeout(_STALL_TIMEOUT_S):
                    piece = await call.read()
                if piece is grpc.aio.EOF:
                    break
                _take(arriving, piece)
        finally:
            call.cancel()
        arriving.end()
    shutil.rmtree(directory, ignore_errors=True)  # of an earlier life of this process
    partial.rename(directory)
    _log.info("got the model's files: %s", ", ".join(arriving.names))
    return directory


def _take(arriving: Arriving, piece: pb.ModelFile) -> None:
    try:
        arriving.take(piece)
    except OSError as error:
        raise UserError(
            field=f"{DIR_MODEL_FILES} in the run folder", rule=f"cannot be written: {error}", fix="free or fix the disk"
        ) from error


def _judge(error: Exception, source: SchedulerAddress) -> str:
    """What the next attempt may overcome, as text; raises for the rest."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return str(error) or f"no answer for {_STALL_TIMEOUT_S:g} s"
    if (refused := refusal_of(error, address=source.scheduler, tls=source.tls)) is not None:
        raise refused from None
    text = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        raise UserError(field="spec.model", rule=f"cannot be handed to generators: {error.details()}") from None
    return text
