"""Links, packed groups, numbers' files: the small parts of the shell."""

import asyncio
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import HandGroup
from streamrl_workers.scheduler.shell.link import Link, SlowPeerError
from streamrl_workers.scheduler.shell.signal_pages import last_line
from streamrl_workers.scheduler.shell.wire import group_command
from support.journals import trajectory


def stop(reason: str) -> pb.TrainerCommand:
    return pb.TrainerCommand(stop=pb.Stop(reason=reason))


async def test_messages_leave_in_order_and_end_closes_after_them() -> None:
    link, written = Link("peer"), []

    async def write(data: bytes) -> None:
        written.append(data)

    link.send(stop("a"))
    link.send_later(10, lambda: b"made late")
    link.send(stop("b"))
    link.end()
    link.send(stop("too late"))
    await link.write_all(write)
    assert written == [stop("a").SerializeToString(), b"made late", stop("b").SerializeToString()]


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    link, reads = Link("generator g", limit_bytes=100), asyncio.Event()

    async def write(data: bytes) -> None:
        await reads.wait()

    writer = asyncio.create_task(link.write_all(write), name="writer")
    link.send(stop("x" * 60))
    await asyncio.sleep(0)
    assert not writer.done()
    link.send(stop("x" * 60))
    async with asyncio.timeout(10):
        with pytest.raises(SlowPeerError, match="generator g is cut off"):
            await writer


@pytest.mark.parametrize("samples", [0, 1, 8])
@pytest.mark.parametrize("tokens", [1, 40, 5000])
def test_packed_group_is_the_message(samples: int, tokens: int) -> None:
    blobs = tuple(trajectory(7, index, tokens=tokens) for index in range(samples))
    effect = HandGroup(group_id=7, step=300, trajectories=blobs, size_bytes=sum(map(len, blobs)))
    parsed = [pb.Trajectory.FromString(data) for data in blobs]
    group = pb.Group(group_id=7, step=300, trajectories=parsed, size_bytes=effect.size_bytes)
    assert pb.TrainerCommand.FromString(group_command(effect)) == pb.TrainerCommand(group=group)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ('{"step": 1}\n{"step": 2}\n', {"step": 2}), ('{"step": 1}\n{"st', {"step": 1}), ("{", {})],
)
def test_last_whole_line(tmp_path: Path, text: str, expected: dict[str, int]) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    assert last_line(path) == expected
    assert last_line(tmp_path / "none.jsonl") == {}
