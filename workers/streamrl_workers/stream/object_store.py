"""Folders of object stores, by fsspec: `s3://bucket/runs`, `gs://bucket/runs`, and what else is installed.

Owns: which URLs are taken, objects, copies of directories and files, and what the libraries raise. Does not own what they mean.

An object is written whole or not at all. No object store can rename. A folder is whole when its *commit object* is there: `upload` writes it last, `remove` takes it away first.
Invariants: a folder with its commit object holds the others as they were written, whenever a writer is killed. One writer a folder.
What the store says that it has taken is asked for its size before anything relies on it; a copy has the sizes, and is of the versions, that the store names.
Waits for: the store, with the retries of its library and a deadline for each call, since libraries have waits without one. Credentials are the library's: environment, account, or instance.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from streamrl.errors import UserError, shorten
from streamrl.spec.base import is_url

_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError")
"""Of botocore and google-auth."""
_PASSING = ("ExpiredToken", "RequestTimeTooSkewed")
"""Codes of S3 that s3fs tells as a right that is missing."""
_CORRUPT = ("FlexibleChecksumError", "ChecksumError")
"""Of botocore and gcsfs: bytes that do not have the checksum with which they were written."""
_OF_THE_DISK = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES))
"""No library here tells these numbers of its store."""
PROBE = ".streamrl-probe-"
"""Begins the names of objects that probes write and delete."""
_BLOCK_BYTES = 32 * 2**20
"""Of a large object, in memory while it is sent."""
_HASH_CHARACTERS = 16
CALL_TIMEOUT_S = 300.0
"""Of one call, repetitions by the library included, beside the time for an object's bytes."""
_LEAST_BYTES_PER_S = 2**20
"""A slower store has hung."""


class StoreUnavailableError(Exception):
    """The store did not do it this time; the text says what and why."""


class DamagedObjectError(StoreUnavailableError):
    """An object whose bytes are not those that were written; the text names it."""


@dataclass(frozen=True, slots=True)
class ObjectFolder:
    """A folder of an object store; `field` is the job's field that named it."""

    files: Any  # fsspec's AbstractFileSystem, which has no types
    path: str
    url: str
    field: str

    @classmethod
    def at(cls, url: str, *, field: str) -> "ObjectFolder":
        """The folder at a URL; nothing is asked of the store.

        Raises:
            UserError: no library here reads such URLs.
        """
        import fsspec

        fix = "use s3://bucket/folder or gs://bucket/folder"
        try:
            files, path = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, skip_instance_cache=True)
        except (ImportError, ValueError) as error:
            raise UserError(
                field=field, rule=f"cannot be read here: {shorten(str(error))}", got=url, fix=fix
            ) from error
        if "file" in files.protocol:
            raise UserError(field=field, rule="must be an object store, not a disk", got=url, fix=fix)
        return cls(files, path, url.rstrip("/"), field)

    def child(self, name: str) -> "ObjectFolder":
        """A folder in it."""
        return ObjectFolder(self.files, f"{self.path}/{name}", f"{self.url}/{name}", self.field)

    def folders(self) -> list[str]:
        """Names of the folders in it, whole or not."""
        with self._door("list"):
            try:
                found = self._call("ls", self.path, detail=True)
            except FileNotFoundError:
                return []
        return sorted(PurePosixPath(one["name"]).name for one in found if one["type"] == "directory")

    def holds(self, name: str) -> bool:
        """Whether there is an object of that name in it."""
        with self._door("ask"):
            return bool(self._call("exists", f"{self.path}/{name}"))

    def upload(self, directory: Path, *, commit: str) -> None:
        """Copy a directory, its file `commit` last. What was there before is no longer whole from the first write on."""
        names = sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())
        assert commit in names, f"{commit} is part of what is written"
        self._uncommit(commit)
        with self._door("write"):
            for name in (*(name for name in names if name != commit), commit):
                size_bytes = (directory / name).stat().st_size
                self._call("put_file", str(directory / name), f"{self.path}/{name}", size_bytes=size_bytes)
                self._check_written(name, size_bytes=size_bytes)

    def download(self, directory: Path) -> None:
        """Copy it into a directory. Raises `OSError` where the disk does not take it."""
        self._get(self.names(), directory)

    def copy(self, cache_dir: Path, *, names: list[str]) -> Path:
        """A directory with these objects, made once for what they hold now: whole or not there at all. Raises `OSError` as `download`."""
        found = self._infos(names)
        versions = [(name, hashlib.sha256(str(info).encode()).hexdigest()) for name, info in found.items()]
        key = hashlib.sha256(repr((self.url, versions)).encode()).hexdigest()[:_HASH_CHARACTERS]
        target = cache_dir.resolve() / key

        def fill(beside: Path) -> None:
            self._get(names, beside)
            if self._infos(names) != found:
                raise StoreUnavailableError(f"cannot read {self.url}: it was changed meanwhile")

        if not target.is_dir():
            make_directory(target, fill)
        return target

    def remove(self, *, commit: str) -> None:
        """Delete it, the file `commit` first."""
        self._uncommit(commit)
        with self._door("delete"), contextlib.suppress(FileNotFoundError):
            self._call("rm", self.path, recursive=True)

    def sizes(self) -> dict[str, int]:
        """Bytes of each object below it, by name."""
        with self._door("list"):
            found = self._call("find", self.path, detail=True)
        return {str(PurePosixPath(path).relative_to(self.path)): int(one["size"]) for path, one in found.items()}

    def size(self, name: str) -> int | None:
        """Return the bytes of an object; None: it is not there."""
        with self._door("ask"):
            try:
                return int(self._call("info", f"{self.path}/{name}")["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str, *, begin: int, end: int) -> bytes | None:
        """These bytes of an object, fewer where it ends; None: it is not there."""
        with self._door("read"):
            try:
                return bytes(self._call("cat_file", f"{self.path}/{name}", start=begin, end=end))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: memoryview) -> None:
        """Write an object."""
        path = f"{self.path}/{name}"
        with self._door("write"):
            with self.files.open(path, "wb", block_size=_BLOCK_BYTES) as file:
                for begin in range(0, len(data), _BLOCK_BYTES):
                    file.write(data[begin : begin + _BLOCK_BYTES])
            self._check_written(name, size_bytes=len(data))

    def delete(self, names: Collection[str]) -> None:
        """Delete these objects."""
        paths = [f"{self.path}/{name}" for name in names]
        with self._door("delete"):
            if paths:
                self._call("rm", paths)

    def probe(self) -> None:
        """Write and delete a small object, which others do here too: a mistake shows before the first step, not after hours."""
        path = f"{self.path}/{PROBE}{uuid.uuid4().hex}"
        with self._door("write"):
            self._call("pipe_file", path, b"")
            self._call("rm_file", path)

    def names(self, patterns: tuple[str, ...] = ("*",)) -> list[str]:
        """Of the objects below it that match; one that leaves the folder is refused."""
        with self._door("list"):
            paths = sorted(self._call("find", self.path))
        found = [str(PurePosixPath(path).relative_to(self.path)) for path in paths]
        found = [name for name in found if any(fnmatch(name, pattern) for pattern in patterns)]
        if bad := [name for name in found if ".." in PurePosixPath(name).parts]:
            raise UserError(field=self.field, rule="must hold no name with '..'", got=bad[0])
        if not found:
            raise UserError(
                field=self.field, rule="holds nothing that could be read", got=self.url, fix="check the URL"
            )
        return found

    def _infos(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """Return what the store says of each object: its size, and what changes with it."""
        with self._door("read"):
            return {name: self._call("info", f"{self.path}/{name}") for name in names}

    def _check_written(self, name: str, *, size_bytes: int) -> None:
        if (found := self.size(name)) != size_bytes:
            raise StoreUnavailableError(f"cannot write {self.url}/{name}: the store has {found} of {size_bytes} bytes")

    def _uncommit(self, commit: str) -> None:
        if self.holds(commit):
            with self._door("delete"):
                self._call("rm_file", f"{self.path}/{commit}")

    def _call(self, method: str, *arguments: Any, size_bytes: int = 0, **options: Any) -> Any:  # noqa: ANN401 - fsspec's
        """Call the library, whose asynchronous parts take a deadline. `size_bytes`: of the object that is written or read."""
        if self.files.async_impl:
            options["timeout"] = CALL_TIMEOUT_S + size_bytes / _LEAST_BYTES_PER_S
        return getattr(self.files, method)(*arguments, **options)

    def _get(self, names: list[str], directory: Path) -> None:
        for name in names:
            path, target = f"{self.path}/{name}", directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._door("read"):
                try:
                    size_bytes = int(self._call("info", path)["size"])
                    self._call("get_file", path, str(target), size_bytes=size_bytes)
                except FileNotFoundError as error:
                    raise DamagedObjectError(f"{self.url}/{name} is missing, though the store has named it") from error
            if (got := target.stat().st_size) != size_bytes:
                raise DamagedObjectError(f"cannot read {self.url}/{name}: {got} of {size_bytes} bytes came")

    @contextlib.contextmanager
    def _door(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (UserError, StoreUnavailableError):
            raise
        except TimeoutError as error:
            raise StoreUnavailableError(f"cannot {verb} {self.url}: it has not answered in time") from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise
            told = f"cannot {verb} {self.url}: {type(error).__name__}: {shorten(str(error))}"
            if type(error).__name__ in _CORRUPT:
                raise DamagedObjectError(told) from error
            if _is_final(error):
                raise UserError(field=self.field, rule=told, fix="check bucket, rights and credentials") from error
            raise StoreUnavailableError(told) from error


def _is_final(error: Exception) -> bool:
    """Whether it does not come by asking again: what is not there, not allowed, or has no credentials at all. Those that have run out are renewed."""
    if any(word in f"{error} {error.__cause__}" for word in _PASSING):
        return False
    return isinstance(error, (FileNotFoundError, PermissionError)) or type(error).__name__ in _NO_CREDENTIALS


def local_file(path: str, *, base_dir: Path, field: str) -> Path:
    """The file of a path that a job names: relative to the job, or a copy of what its URL holds now.

    Raises:
        UserError: the URL cannot be read.
        StoreUnavailableError: not this time.
        OSError: the disk does not take the copy.
    """
    if not is_url(path):
        return base_dir / path
    url, _, name = path.rpartition("/")
    return ObjectFolder.at(url, field=field).copy(_cache_dir(), names=[name]) / name


def local_directory(url: str, *, cache_dir: Path, field: str, patterns: tuple[str, ...]) -> Path:
    """A copy of what matches in the folder at a URL. Errors as of `local_file`."""
    folder = ObjectFolder.at(url, field=field)
    return folder.copy(cache_dir, names=folder.names(patterns))


def make_directory(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a directory beside and rename it; one that another process made meanwhile is as good.

    Raises:
        OSError: the disk does not take it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        fill(beside)
        beside.chmod(0o755)  # mkdtemp's is for its owner alone
        beside.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _cache_dir() -> Path:
    """Beside what is downloaded from the hub."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "objects"
