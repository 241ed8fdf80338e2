"""Files of a model in pieces, for a stream: which ones, how large they may be, and what they must hash to on arrival.

Owns the rules that both ends share. Does not own the stream (`scheduler/shell/model_files.py`, `generator/model_fetch.py`).
Everything that says how the model is built and how text becomes tokens goes; weights do not: those come by the pull.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from streamrl.proto import stream_pb2 as pb

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
        if len(self._data) != piece.size_bytes or _digest(bytes(self._data)) != piece.hash:
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


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
