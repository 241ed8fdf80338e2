"""The archive's format: what was written is read, whatever happens between; all else is refused in one line."""

import os
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream import archive
from streamrl_workers.stream.archive import ArchivePosition, ArchiveWriter, is_archived, read_archive, segment_path

SMALL = 20_000
"""Bytes of an archive whose segments hold a few groups each."""


def group(group_id: int, *, size_bytes: int = 300) -> tuple[pb.ArchivedGroup, pb.ArchivedSamples]:
    """A group whose samples do not shrink."""
    data = random.Random(group_id).randbytes(size_bytes)
    head = pb.ArchivedGroup(group_id=group_id, step=group_id // 2, samples=[pb.ArchivedSample(reward=1.0, tokens=3)])
    return head, pb.ArchivedSamples(samples=[pb.Sample(group_id=group_id, tokens=data)])


def write(
    folder: Path, groups: Sequence[int], *, at: ArchivePosition | None = None, max_bytes: int = 2**20
) -> ArchivePosition:
    writer = ArchiveWriter(folder, max_bytes=max_bytes, at=at or ArchivePosition())
    for group_id in groups:
        assert writer.append(*group(group_id))
    position = writer.sync()
    writer.close()
    return position


def read(folder: Path, end: ArchivePosition | None = None) -> list[int]:
    """Ids of the groups, each of which has the samples that were written."""
    entries = list(read_archive(folder, beneath=folder.parent, end=end))
    for entry in entries:
        written = group(entry.head.group_id, size_bytes=len(entry.samples().samples[0].tokens))
        assert (entry.head, entry.samples()) == written
    return [entry.head.group_id for entry in entries]


LIVES = st.lists(
    st.tuples(st.lists(st.integers(0, 3000), max_size=12), st.integers(0, 12), st.binary(max_size=200)), max_size=5
)
"""Of each process: the bytes of the groups that it writes, how many of them it syncs, and what a kill leaves half written."""


@settings(max_examples=30, deadline=None)
@given(lives=LIVES)
def test_each_group_that_was_synced_is_there_once_from_the_oldest_kept_on(
    lives: list[tuple[list[int], int, bytes]],
) -> None:
    """Processes come and go; what one had written behind its last position is lost with it, or torn; the bound holds."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "archive"
        position, kept, number = ArchivePosition(), list[int](), 0
        for sizes, synced, torn in lives:
            writer = ArchiveWriter(folder, max_bytes=SMALL, at=position)
            for written, size_bytes in enumerate(sizes):
                assert writer.append(*group(number, size_bytes=size_bytes))
                assert sum(file.stat().st_size for file in folder.iterdir()) <= SMALL
                if written < synced:
                    position = writer.sync()
                    kept.append(number)
                number += 1
            writer.close()
            if position.offset and segment_path(folder, position.segment).exists():
                with segment_path(folder, position.segment).open("ab") as file:
                    file.write(torn)
        found = read(folder, position) if position.offset else []
        assert found == kept[len(kept) - len(found) :]
        assert len(found) == len(kept) or position.segment > 0


def test_the_oldest_segments_go_first_and_the_rest_still_proves_itself(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    position = write(folder, range(200), max_bytes=SMALL)
    found = read(folder, position)
    assert found == list(range(200 - len(found), 200))
    assert 20 < len(found) < 100
    assert min(file.name for file in folder.iterdir()) > segment_path(folder, 0).name


def test_every_byte_of_every_segment_is_covered(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    position = write(folder, range(40), max_bytes=SMALL)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for at in range(0, len(whole), 151):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(UserError, match="is damaged: ") as refused:
                read(folder, position)
            assert str(path) in str(refused.value) or path.name != max(file.name for file in folder.iterdir())
        path.write_bytes(whole)
    assert read(folder, position)


@pytest.mark.parametrize("change", ["cut", "removed", "exchanged", "longer"])
def test_a_segment_that_is_another_one_is_refused(change: str, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    position = write(folder, range(40), max_bytes=SMALL)
    first, second, third, *_ = sorted(folder.iterdir())
    match change:
        case "cut":  # at the end of a frame, where nothing is torn
            entries = [entry for entry in read_archive(folder, beneath=tmp_path, end=position) if entry.path == second]
            offset, body_bytes, _ = entries[-2].body
            second.write_bytes(second.read_bytes()[: offset + body_bytes])
        case "removed":
            second.unlink()
        case "exchanged":
            second.write_bytes(third.read_bytes())
        case _:
            second.write_bytes(second.read_bytes() + bytes(8))
    with pytest.raises(UserError, match="is damaged"):
        read(folder, position)
    assert first.exists()


def test_without_a_place_the_newest_segment_may_be_torn_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    write(folder, range(40), max_bytes=SMALL)
    whole = read(folder)
    older, newest = sorted(folder.iterdir())[-2:]
    newest.write_bytes(newest.read_bytes()[:-5])
    assert read(folder) == whole[:-1]
    older.write_bytes(older.read_bytes()[:-5])
    with pytest.raises(UserError, match="is cut off"):
        read(folder)


def test_an_archive_that_was_taken_away_begins_again(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    position = write(folder, range(5))
    for path in folder.iterdir():
        path.unlink()
    unchanged = write(folder, [], at=position)
    position = write(folder, [7, 8], at=unchanged)
    assert read(folder, position) == [7, 8]


def test_a_group_that_is_too_large_is_left_out(tmp_path: Path) -> None:
    writer = ArchiveWriter(tmp_path / "archive", max_bytes=SMALL, at=ArchivePosition())
    assert not writer.append(*group(0, size_bytes=SMALL))
    assert writer.append(*group(1))
    position = writer.sync()
    writer.close()
    assert read(tmp_path / "archive", position) == [1]


@pytest.mark.parametrize("what", ["fifo", "link", "directory"])
def test_what_is_no_file_is_refused(what: str, tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    position = write(folder, range(3))
    path = segment_path(folder, 0)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    match what:
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to(elsewhere)
        case _:
            path.mkdir()
    with pytest.raises(UserError, match=r"must (not be a symbolic link|be a regular file)"):
        read(folder, position)


# ---- digests are of whoever made the file: they keep nobody from making one that is hostile


def forged(folder: Path, *, head: bytes, body: bytes, raw_bytes: int) -> None:
    """A segment of one frame, with digests that are right."""
    folder.mkdir(exist_ok=True)
    sizes = struct.pack("<III", len(head), len(body), raw_bytes)
    digest = archive._digest(body)
    chain = archive._digest(archive.NO_CHAIN, sizes, digest, head)
    header = struct.pack("<8sQ16s", b"SRLARCH1", 0, archive.NO_CHAIN)
    segment_path(folder, 0).write_bytes(b"".join((header, sizes, digest, chain, head, body)))


@pytest.mark.parametrize("size_bytes", [0, 1, 300, 10_000])
def test_a_body_that_an_earlier_release_has_compressed_is_read_though_it_grew(size_bytes: int, tmp_path: Path) -> None:
    head, samples = group(1, size_bytes=size_bytes)
    raw = samples.SerializeToString()
    body = zlib.compress(raw, 1)
    assert len(body) > len(raw)
    forged(tmp_path / "archive", head=head.SerializeToString(), body=body, raw_bytes=len(raw))
    assert read(tmp_path / "archive") == [1]


def test_a_body_that_an_earlier_release_has_compressed_to_its_own_size_is_read(tmp_path: Path) -> None:
    head, _ = group(1)
    for zeros in range(100):
        raw = pb.ArchivedSamples(samples=[pb.Sample(group_id=1, tokens=bytes(zeros))]).SerializeToString()
        body = zlib.compress(raw, 1)
        if len(body) == len(raw):
            break
    else:
        pytest.fail("no such size")
    forged(tmp_path / "archive", head=head.SerializeToString(), body=body, raw_bytes=len(raw))
    (entry,) = read_archive(tmp_path / "archive", beneath=tmp_path)
    assert entry.samples().SerializeToString() == raw


def test_a_body_that_grows_beyond_what_its_frame_says_is_refused(tmp_path: Path) -> None:
    head, _ = group(1)
    forged(tmp_path / "archive", head=head.SerializeToString(), body=zlib.compress(bytes(2**24)), raw_bytes=2**20)
    (entry,) = read_archive(tmp_path / "archive", beneath=tmp_path)
    with pytest.raises(UserError, match="the samples of group 1 are not what was written"):
        entry.samples()


@settings(max_examples=100, deadline=None)
@given(head=st.binary(max_size=60), raw=st.binary(max_size=60), shrinks=st.booleans(), more=st.integers(-1, 2**32 - 61))
def test_whatever_stands_in_a_frame_is_read_or_refused_in_a_line(
    head: bytes, raw: bytes, shrinks: bool, more: int
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name) / "archive"
        raw_bytes = max(0, len(raw) + more)
        forged(folder, head=head, body=zlib.compress(raw) if shrinks else raw, raw_bytes=raw_bytes)
        try:
            for entry in read_archive(folder, beneath=folder.parent):
                assert entry.head.SerializeToString() is not None
                assert entry.samples().ByteSize() <= raw_bytes
        except UserError as error:
            assert str(error).count("\n") == 0


@pytest.mark.parametrize("share_percent", [1, 10, 50, 99])
def test_a_share_is_that_share_of_any_ids_that_follow_each_other(share_percent: int) -> None:
    for first in (0, 12_345, 2**40):
        kept = sum(is_archived(first + number, share_percent=share_percent) for number in range(2000))
        assert kept == pytest.approx(20 * share_percent, abs=12)


def test_none_and_all_are_shares_too() -> None:
    assert not any(is_archived(number, share_percent=0) for number in range(1000))
    assert all(is_archived(number, share_percent=100) for number in range(1000))
