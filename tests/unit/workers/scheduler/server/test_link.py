"""Links, packed groups, numbers' files: the small parts of the shell."""

import asyncio
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler.effects import DeliverGroup
from streamrl_workers.scheduler.server.connections import PeerLink, SlowPeerError
from streamrl_workers.scheduler.server.peer_messages import group_commands
from streamrl_workers.scheduler.server.status_endpoint import last_line
from streamrl_workers.stream.packing import BATCH_BYTES
from support.journals import trajectory


def stop(reason: str) -> pb.TrainerCommand:
    return pb.TrainerCommand(stop=pb.Stop(reason=reason))


async def test_messages_leave_in_order_and_end_closes_after_them() -> None:
    link, written = PeerLink("peer"), []

    async def write(data: bytes) -> None:
        written.append(pb.Frame.FromString(data).data)

    link.send(stop("a"))
    link.send_later(lambda: iter([b"made late"]))
    link.send(stop("b"))
    link.end()
    link.send(stop("too late"))
    await link.write_all(write)
    assert written == [stop("a").SerializeToString(), b"made late", stop("b").SerializeToString()]


async def test_a_peer_that_does_not_read_is_cut_off() -> None:
    link, reads = PeerLink("generator g", limit_bytes=100), asyncio.Event()

    async def write(data: bytes) -> None:
        await reads.wait()

    writer = asyncio.create_task(link.write_all(write), name="writer")
    link.send(stop("x" * 60))
    await asyncio.sleep(0)
    assert not writer.done()
    link.send(stop("x" * 60))
    async with asyncio.timeout(120):
        with pytest.raises(SlowPeerError, match="generator g is cut off"):
            await writer


@pytest.mark.parametrize("samples", [0, 1, 8])
@pytest.mark.parametrize("tokens", [1, 40, 5000])
def test_packed_group_is_the_message(samples: int, tokens: int) -> None:
    blobs = tuple(trajectory(7, index, tokens=tokens) for index in range(samples))
    effect = DeliverGroup(group_id=7, step=300, trajectories=blobs, size_bytes=sum(map(len, blobs)))
    parsed = [pb.Sample.FromString(data) for data in blobs]
    group = pb.Group(group_id=7, step=300, samples=parsed, size_bytes=effect.size_bytes)
    (command,) = group_commands(effect)
    assert pb.TrainerCommand.FromString(command) == pb.TrainerCommand(group=group)


def test_a_large_group_goes_in_parts() -> None:
    tokens = BATCH_BYTES // 8 // 3
    blobs = tuple(trajectory(7, index, tokens=tokens) for index in range(7))
    effect = DeliverGroup(group_id=7, step=300, trajectories=blobs, size_bytes=sum(map(len, blobs)))
    parts = [pb.TrainerCommand.FromString(command).group for command in group_commands(effect)]
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert [(part.group_id, part.step, part.size_bytes) for part in parts] == [(7, 300, effect.size_bytes)] * len(parts)
    assert [sample.sample_index for part in parts for sample in part.samples] == list(range(7))
    assert all(part.ByteSize() <= BATCH_BYTES + 100 for part in parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", {}), ('{"step": 1}\n{"step": 2}\n', {"step": 2}), ('{"step": 1}\n{"st', {"step": 1}), ("{", {})],
)
def test_last_whole_line(tmp_path: Path, text: str, expected: dict[str, int]) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    assert last_line(path) == expected
    assert last_line(tmp_path / "none.jsonl") == {}
