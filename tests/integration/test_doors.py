"""The scheduler's gRPC door: a peer that says what it must not say is refused, and nobody else notices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from math import nan
from typing import Any

import grpc
import grpc.aio
import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.auth import await_admission, call_metadata
from streamrl_workers.stream.channel import connect
from streamrl_workers.stream.messages import Joiner, frames
from support.jobs import simulated_job, write_prompts
from support.runs import DEADLINE_S
from support.worker_processes import Workers

GENERATE, TRAIN = "/streamrl.v1alpha1.Scheduler/Generate", "/streamrl.v1alpha1.Scheduler/Train"


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("doors")
    write_prompts(folder / "prompts.jsonl")
    started = Workers.prepare(simulated_job(), folder=folder / "run")
    started.start_scheduler()
    yield started
    started.close()


class Peer:
    """Speaks to the scheduler in frames of its own making."""

    def __init__(self, call: Any, kind: Any) -> None:
        self._call = call
        self._joiner = Joiner(kind)

    async def say(self, message: Any) -> None:
        await self.say_raw(frame.SerializeToString() for frame in frames(message.SerializeToString()))

    async def say_raw(self, data: Iterator[bytes]) -> None:
        """Until all is said, or the call is over."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            async with asyncio.timeout(DEADLINE_S):
                for one in data:
                    await self._call.write(one)

    async def hear(self) -> Any:
        async with asyncio.timeout(DEADLINE_S):
            return await self._joiner.read(self._call)

    async def end(self) -> tuple[str, str]:
        """How the scheduler ends the call: status and text. They come behind all that it has said."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self._joiner.read(self._call) is not None:
                    pass
            return (await self._call.code()).name, await self._call.details()

    def is_connected(self) -> bool:
        return not self._call.done()


@asynccontextmanager
async def peer(workers: Workers, path: str = GENERATE) -> AsyncIterator[Peer]:
    channel = await connect(f"127.0.0.1:{workers.scheduler_port}", timeout_s=DEADLINE_S, who="the scheduler")
    async with channel:
        call = channel.stream_stream(path, response_deserializer=pb.Frame.FromString)(
            metadata=call_metadata(workers.token)
        )
        async with asyncio.timeout(DEADLINE_S):
            await await_admission(call)
        yield Peer(call, pb.GeneratorCommand if path == GENERATE else pb.TrainerCommand)


def hello(name: str = "hostile", **changes: Any) -> pb.GeneratorEvent:
    fields = {"generator_id": name, "instance": "1", "pool": "sim", "slots": 4}
    return pb.GeneratorEvent(hello=pb.GeneratorHello(**fields | changes))


def version(step: int) -> pb.VersionName:
    return pb.VersionName(attempt=1, step=step, hash=b"x")


HELLOS = {
    "a name of 30 MB": hello("x" * 30_000_000),
    "a name with control characters": hello("g\x1b[2J"),
    "no name": hello(""),
    "no instance": hello(instance=""),
    "a pool of 300 characters": hello(pool="p" * 300),
    "no slots": hello(slots=0),
    "too many slots": hello(slots=2**32 - 1),
    "weights that nobody has made": hello(version=version(10**18)),
    "no hello": pb.GeneratorEvent(heartbeat=pb.Heartbeat()),
}
EVENTS = {
    "a second hello": hello(),
    "a wall that is no number": pb.GeneratorEvent(heartbeat=pb.Heartbeat(wall_seconds=nan)),
    "many parts of the wall": pb.GeneratorEvent(
        heartbeat=pb.Heartbeat(bubble_seconds={str(number): 1.0 for number in range(10_000)})
    ),
    "a part with a long name": pb.GeneratorEvent(heartbeat=pb.Heartbeat(bubble_seconds={"x" * 1000: 1.0})),
    "weights that nobody has made": pb.GeneratorEvent(weights_loaded=pb.WeightsLoaded(version=version(10**18))),
    "a long error": pb.GeneratorEvent(weights_failed=pb.WeightsFailed(version=version(0), error="x" * 10**6)),
    "a number beyond the journal's": pb.GeneratorEvent(heartbeat=pb.Heartbeat(tokens=2**64 - 1)),
    "a message of 200 MB": pb.GeneratorEvent(
        progress=pb.ProgressBatch(items=[pb.Progress(lease=1, tokens=bytes(200_000_000))])
    ),
}


async def _refused(workers: Workers, bad: Peer, bystander: Peer) -> None:
    """The status is lost to one whose write it meets half-way: grpc calls that INTERNAL."""
    status, text = await bad.end()
    assert status in ("INVALID_ARGUMENT", "INTERNAL"), text
    assert not workers.ended("scheduler"), workers.text("scheduler")
    assert len(text) < 400
    await bystander.say(pb.GeneratorEvent(heartbeat=pb.Heartbeat()))
    assert bystander.is_connected()


@pytest.fixture
async def bystander(workers: Workers) -> AsyncIterator[Peer]:
    async with peer(workers) as made:
        await made.say(hello("bystander"))
        assert (await made.hear()).WhichOneof("command") == "welcome"
        yield made


@pytest.mark.parametrize("case", HELLOS)
async def test_a_generator_with_a_bad_hello_is_refused(workers: Workers, bystander: Peer, case: str) -> None:
    async with peer(workers) as bad:
        await bad.say(HELLOS[case])
        await _refused(workers, bad, bystander)


@pytest.mark.parametrize("case", EVENTS)
async def test_a_generator_with_a_bad_event_is_refused(workers: Workers, bystander: Peer, case: str) -> None:
    async with peer(workers) as bad:
        await bad.say(hello())
        assert (await bad.hear()).WhichOneof("command") == "welcome"
        await bad.say(EVENTS[case])
        await _refused(workers, bad, bystander)


@pytest.mark.parametrize(
    "data", [b"\xff" * 10, pb.Frame(data=b"\xff" * 10).SerializeToString()], ids=["frame", "event"]
)
@pytest.mark.parametrize("path", [GENERATE, TRAIN])
@pytest.mark.parametrize("first", [True, False])
async def test_bytes_that_are_no_message_are_refused(
    workers: Workers, bystander: Peer, data: bytes, path: str, first: bool
) -> None:
    async with peer(workers, path) as bad:
        if not first:
            trainer = pb.TrainerEvent(hello=pb.TrainerHello(trainer_id="t", instance="i"))
            await bad.say(hello() if path == GENERATE else trainer)
            await bad.hear()
        await bad.say_raw(iter([data]))
        await _refused(workers, bad, bystander)


TRAINER_EVENTS = {
    "a long address": pb.TrainerEvent(hello=pb.TrainerHello(trainer_id="t", instance="i", weights_address="x" * 10**5)),
    "a name of 5 MB": pb.TrainerEvent(hello=pb.TrainerHello(trainer_id="t" * 5_000_000, instance="i")),
    "a step of a million groups": pb.TrainerEvent(step_done=pb.StepDone(group_ids=range(2**60, 2**60 + 10**6))),
    "checkpoints in the wrong order": pb.TrainerEvent(checkpointed=pb.Checkpointed(step=0, oldest_step=10**18)),
    "a number beyond the journal's": pb.TrainerEvent(sync_journal=pb.SyncJournal(step=2**64 - 1)),
}


@pytest.mark.parametrize("case", TRAINER_EVENTS)
async def test_a_trainer_with_a_bad_event_is_refused(workers: Workers, bystander: Peer, case: str) -> None:
    event = TRAINER_EVENTS[case]
    async with peer(workers, TRAIN) as bad:
        if not event.HasField("hello"):
            await bad.say(pb.TrainerEvent(hello=pb.TrainerHello(trainer_id="t", instance="i")))
            assert (await bad.hear()).WhichOneof("command") == "welcome"
        await bad.say(event)
        await _refused(workers, bad, bystander)


def trainer_hello(name: str, *, instance: str) -> pb.TrainerEvent:
    return pb.TrainerEvent(hello=pb.TrainerHello(trainer_id=name, instance=instance))


async def _welcome(workers: Workers, greeting: Any, *, path: str) -> None:
    """Come again until the place is free."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            async with peer(workers, path) as one:
                await one.say(greeting)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await one.hear()).WhichOneof("command") == "welcome"
                    return


@pytest.mark.parametrize(
    ("path", "greet", "who"),
    [(GENERATE, hello, "generator twin"), (TRAIN, trainer_hello, "trainer twin")],
    ids=["generator", "trainer"],
)
async def test_a_name_is_its_first_process_until_that_has_ended(
    workers: Workers, path: str, greet: Any, who: str
) -> None:
    async with peer(workers, path) as broken, peer(workers, path) as holder:
        await broken.say(greet("twin", instance="older"))
        assert (await broken.hear()).WhichOneof("command") == "welcome"
        await holder.say(greet("twin", instance="older"))  # the same process, which has noticed a break before us
        assert (await holder.hear()).WhichOneof("command") == "welcome"
        assert (await broken.end())[0] == "OK"
        for _ in range(2):
            async with peer(workers, path) as newer:
                await newer.say(greet("twin", instance="newer"))
                status, text = await newer.end()
            assert status == "ALREADY_EXISTS"
            assert f"{who} is connected as instance older; instance newer gets its place when" in text
            assert "give each its own STREAMRL_PROCESS" in text
        assert workers.text("scheduler").count(f"refused {who}: ") == 1
        assert holder.is_connected()
    await _welcome(workers, greet("twin", instance="newer"), path=path)
