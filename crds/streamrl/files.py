"""The door to files that somebody else may have made: run folders, and files that users name.

Owns how such a file is opened, read within bounds, and replaced. Does not own what it means.

Reading: only regular files are opened, so that nobody waits for a FIFO or a device; what is larger than its bound is refused. In a run
folder (`beneath`) no symbolic link is followed, neither of a file nor of a directory.
Writing: the file is written beside and renamed over the old one. A reader sees the old file or the new one, also after a power cut; a link
at the target is replaced, never followed. A file that users name for an output is refused beforehand where it is anything but a regular one.
"""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from streamrl.errors import UserError

MOST_JSON_BYTES = 16 * 2**20
"""Of a file that is read whole where its reader names no other bound."""
_PORTION_BYTES = 2**20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK  # not blocking: a FIFO without a writer opens at once
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY


class MissingFileError(UserError):
    """There is no such file."""


class UnreadableFileError(UserError):
    """The disk or the rights do not give it, maybe for a moment: nothing is known of what it holds."""


def open_regular(path: Path, *, beneath: Path | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: the file.
        beneath: a folder above it whose content is foreign; links in it are refused. The way to it may have links.

    Raises:
        MissingFileError: there is none.
        UnreadableFileError: it cannot be read.
        UserError: it is a link that must not be followed, or is no regular file.
    """
    try:
        handle = os.open(path, _READ) if beneath is None else _open_beneath(beneath, path)
    except FileNotFoundError as error:
        raise MissingFileError(
            field=str(path), rule=f"cannot be read: {error.strerror}", fix="check the path"
        ) from None
    except OSError as error:
        if beneath is not None and path.is_symlink():
            raise UserError(field=str(path), rule="must not be a symbolic link", fix="check the path") from None
        raise _unreadable(path, error) from None
    except ValueError:  # a NUL in it
        raise UserError(field=str(path), rule="is not the name of a file", fix="check the path") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise UserError(field=str(path), rule="must be a regular file", fix="check the path")
    return os.fdopen(handle, "rb")


def _unreadable(path: Path, error: OSError) -> UnreadableFileError:
    return UnreadableFileError(field=str(path), rule=f"cannot be read: {error.strerror}", fix="check the path")


def _open_beneath(folder: Path, path: Path) -> int:
    with directory_beneath(folder, path.parent) as here:
        return os.open(path.name, _READ | os.O_NOFOLLOW, dir_fd=here)


@contextlib.contextmanager
def directory_beneath(folder: Path, path: Path, *, make: bool = False) -> Iterator[int]:
    """Give a handle of a directory for calls with `dir_fd`, valid in the block.

    Args:
        folder: a folder whose content is foreign; the way to it may have links.
        path: a directory in it, or `folder` itself. No link in it is followed.
        make: make what is missing of it.

    Raises OSError, with ENOTDIR where something in the way is a link or a file.
    """
    here = os.open(folder, _FOLDER)
    try:
        for directory in path.relative_to(folder).parts:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, dir_fd=here)
            inner = os.open(directory, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = inner
        yield here
    finally:
        os.close(here)


def replace_at(directory: int, name: str, data: memoryview, *, beside: str, mode: int | None, durable: bool) -> None:
    """Make `data` the whole content of a file; what lies at its name is replaced, and never followed or written to.

    Args:
        directory: a handle of its directory.
        name: in the directory.
        data: the content.
        beside: name under which it is written; what lies there is deleted.
        mode: of the file; None: as of other new files.
        durable: bring it to the disk before it has its name.

    Raises OSError: it cannot be written. What was there before stays.
    """
    _unlink_at(directory, beside)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=directory)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if mode is not None:
                os.fchmod(handle, mode)
            if durable:
                file.flush()
                os.fsync(handle)
        os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        _unlink_at(directory, beside)
        raise


def _unlink_at(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def read_text(path: Path, *, most_bytes: int, beneath: Path | None = None, fix: str = "") -> str:
    """A file's text.

    Args:
        path: a file in UTF-8; a byte order mark is left out.
        most_bytes: what is larger is refused, and not read.
        beneath: as of `open_regular`.
        fix: what to do about one that is too large.

    Raises:
        MissingFileError: there is none.
        UnreadableFileError: it cannot be read.
        UserError: it is too large, or is not UTF-8.
    """
    try:
        with open_regular(path, beneath=beneath) as file:
            # In portions: for a read of so many bytes so many would be allocated, however small the file is.
            portions = iter(lambda: file.read(_PORTION_BYTES), b"")
            data = b"".join(islice(portions, most_bytes // _PORTION_BYTES + 1))
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(data) > most_bytes:
        raise UserError(field=str(path), rule=f"must be at most {most_bytes} bytes", fix=fix)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(field=f"{path}:{line}", rule="must be UTF-8", fix="save it as UTF-8") from None


def parse_json(text: str, *, parse_float: Callable[[str], Any] | None = None) -> Any:  # noqa: ANN401 - JSON is what it is
    """The value of a JSON text. `parse_float` makes the numbers that are no integers; None = float.

    Raises `ValueError`: it is not JSON, is nested too deep, or has a number of thousands of digits.
    """
    try:
        return json.loads(text, parse_float=parse_float)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None


def read_json(path: Path, *, most_bytes: int = MOST_JSON_BYTES, beneath: Path | None = None) -> Any:  # noqa: ANN401 - as above
    """The value of a JSON file; arguments and errors as of `read_text`.

    Raises `MissingFileError`: there is none. Raises `UserError`: it cannot be read, or is not JSON.
    """
    text = read_text(path, most_bytes=most_bytes, beneath=beneath)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(field=str(path), rule=f"is not JSON: {error}") from None


def bounded_lines(file: BinaryIO, *, name: str, most_bytes: int) -> Iterator[bytes]:
    """The lines of a file with their ends. Raises `UserError` at one of over `most_bytes`; `name` is the file's."""
    number = 0
    while line := file.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise UserError(field=f"{name}:{number}", rule=f"a line must be at most {most_bytes} bytes")
        yield line


def check_output(path: Path, *, field: str) -> None:
    """Before the work: refuse a file to be written, named by a user, where something else than a regular file lies. `field` named it."""
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise UserError(field=field, rule="must be a regular file or a new one", got=str(path), fix="name another")


def _mode(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return path.lstat().st_mode
    return None


def replace_file(path: Path, data: bytes) -> None:
    """Make `data` the whole content of `path`; a regular file keeps its mode, and only its owner may read one that is new.

    Raises `UserError`: it cannot be written, on a full disk too. What was there before stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                if (mode := _mode(path)) is not None and stat.S_ISREG(mode):
                    os.fchmod(file.fileno(), mode & 0o777)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
            raise
        sync(path.parent)
    except OSError as error:
        raise UserError(
            field=str(path), rule=f"cannot be written: {error.strerror}", fix="check its disk and rights"
        ) from None


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, last through a power cut. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
