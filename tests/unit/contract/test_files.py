"""The door to files: what it opens, how much it reads, and how it writes."""

import os
import resource
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.files import MissingFileError, bounded_lines, open_regular, parse_json, read_json, read_text, replace_file


@contextmanager
def full_disk(*, most_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_file_that_is_replaced_is_whole_or_as_before(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.json"
    replace_file(path, b"old")
    with full_disk(most_bytes=4), pytest.raises(UserError, match=r"a\.json: cannot be written: File too large"):
        replace_file(path, b"x" * 10_000)
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    path.chmod(0o640)
    replace_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_at_the_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "a").symlink_to("victim")
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "a").is_symlink()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path / "fifo", tmp_path / "socket", tmp_path, Path("/dev/zero"), tmp_path / "a\0b"):
            with pytest.raises(UserError):
                open_regular(path)


def test_beneath_a_folder_no_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("1")
    (tmp_path / "run" / "in").mkdir(parents=True)
    (tmp_path / "run" / "in" / "a").write_text("1")
    (tmp_path / "run" / "file").symlink_to("in/a")
    (tmp_path / "run" / "folder").symlink_to("../out")
    (tmp_path / "link").symlink_to("run")
    run = tmp_path / "run"
    assert read_json(run / "file") == read_json(run / "folder" / "a") == 1  # the user's own word
    for folder in (run, tmp_path / "link"):
        assert read_json(folder / "in" / "a", beneath=folder) == 1
        with pytest.raises(UserError, match="file: must not be a symbolic link"):
            read_json(folder / "file", beneath=folder)
        with pytest.raises(UserError, match="cannot be read: Not a directory"):
            read_json(folder / "folder" / "a", beneath=folder)
        with pytest.raises(MissingFileError):
            read_json(folder / "none", beneath=folder)


def test_bounds(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345\n1\n")
    assert read_text(path, most_bytes=8) == "12345\n1\n"
    with pytest.raises(UserError, match="must be at most 7 bytes; shorten it"):
        read_text(path, most_bytes=7, fix="shorten it")
    with open_regular(path) as file:
        assert list(bounded_lines(file, name="a", most_bytes=6)) == [b"12345\n", b"1\n"]
    with open_regular(path) as file, pytest.raises(UserError, match="a:1: a line must be at most 5 bytes"):
        list(bounded_lines(file, name="a", most_bytes=5))


@pytest.mark.parametrize("text", ["", "{", "[" * 200_000, "9" * 5000, '{"a": ' + "1" * 4301 + "}", "\x00"])
def test_what_is_no_json_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)
