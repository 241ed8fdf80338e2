"""A directory on a disk that others may write to as well, for single files: what `ObjectFolder` is of an object store.

Owns how its files are opened, and what the disk's errors mean. Does not own what the files are.

Invariants:
- Below the directory that the user named no symbolic link is followed, and only regular files are read.
- A file is written beside and renamed: readers see it whole or not at all. What lay at its name is replaced.
"""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from streamrl.errors import UserError
from streamrl.files import directory_beneath, replace_at
from streamrl_workers.stream.object_store import PROBE, StoreUnavailableError

PARTIAL = ".partial"
"""Ends the name of a file that is being written."""
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK | os.O_NOFOLLOW
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES))
_IN_THE_WAY = frozenset((errno.ELOOP, errno.ENOTDIR, errno.EISDIR))


@dataclass(frozen=True, slots=True)
class DiskFolder:
    """A directory at or below `root`, which the job's field `field` named."""

    root: Path
    path: Path
    field: str

    @classmethod
    def at(cls, path: str, *, field: str) -> "DiskFolder":
        """The directory at an absolute path; nothing is asked of the disk."""
        return cls(Path(path), Path(path), field)

    @property
    def url(self) -> str:
        """Its path."""
        return str(self.path)

    def child(self, name: str) -> "DiskFolder":
        """A directory in it."""
        return DiskFolder(self.root, self.path / name, self.field)

    def probe(self) -> None:
        """Write and delete an empty file, as `ObjectFolder.probe` does."""
        name = f"{PROBE}{uuid.uuid4().hex}"
        with self._door("write"), directory_beneath(self.root, self.path) as here:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=here))
            os.unlink(name, dir_fd=here)

    def sizes(self) -> dict[str, int]:
        """Bytes of each regular file below it, by name."""
        found: dict[str, int] = {}
        with (
            self._door("list"),
            contextlib.suppress(FileNotFoundError),
            directory_beneath(self.root, self.path) as here,
        ):
            for directory, _, names, handle in os.fwalk(".", dir_fd=here):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            found[str(PurePosixPath(directory, name))] = status.st_size
        return found

    def size(self, name: str) -> int | None:
        """Return the bytes of a regular file; None: it is not there."""
        path = self.path / name
        with self._door("ask"):
            try:
                with directory_beneath(self.root, path.parent) as here:
                    status = os.stat(path.name, dir_fd=here, follow_symlinks=False)
            except FileNotFoundError:
                return None
            return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str, *, begin: int, end: int) -> bytes | None:
        """These bytes of a file, fewer where it ends; None: it is not there."""
        path = self.path / name
        with self._door("read"):
            try:
                with directory_beneath(self.root, path.parent) as here:
                    handle = os.open(path.name, _READ, dir_fd=here)
            except FileNotFoundError:
                return None
            with os.fdopen(handle, "rb") as file:
                status = os.fstat(handle)
                if not stat.S_ISREG(status.st_mode):
                    raise UserError(field=self.field, rule="must hold regular files only", got=str(path))
                file.seek(begin)
                return file.read(max(0, min(end, status.st_size) - begin))

    def write(self, name: str, data: memoryview) -> None:
        """Write a file. Raises `OSError`: the disk does not take it."""
        path = self.path / name
        with self._door("write"), directory_beneath(self.root, path.parent, make=True) as here:
            replace_at(here, path.name, data, beside=path.name + PARTIAL, mode=None, durable=True)

    def delete(self, names: Collection[str]) -> None:
        """Delete these files. Raises as `write`."""
        for name in names:
            path = self.path / name
            with (
                self._door("delete"),
                contextlib.suppress(FileNotFoundError),
                directory_beneath(self.root, path.parent) as here,
            ):
                os.unlink(path.name, dir_fd=here)

    @contextlib.contextmanager
    def _door(self, verb: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise
            told = f"cannot {verb} {self.url}: {type(error).__name__}: {error.strerror}"
            if error.errno in _IN_THE_WAY:
                rule = f"{told}: below it there must be no symbolic link, nor a file in the place of a directory"
                raise UserError(field=self.field, rule=rule, fix="remove it, or name another directory") from error
            if isinstance(error, (FileNotFoundError, PermissionError)):
                raise UserError(field=self.field, rule=told, fix="check the directory and its rights") from error
            raise StoreUnavailableError(told) from error
