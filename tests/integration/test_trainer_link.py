"""The trainer's link over real gRPC: a scheduler that is away, that refuses, that goes and comes back."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.stream.channel import bind, make_server
from streamrl_workers.stream.stream_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from streamrl_workers.trainer.endings import RetryError, StoppedError
from streamrl_workers.trainer.link import Address, Link
from streamrl_workers.trainer.session import Identity, Session

TOKEN = "secret"


class Scheduler(SchedulerServicer):
    """Welcomes; closes the stream after the first event behind hello, stops the run on the second connection."""

    def __init__(self) -> None:
        self.hellos: list[pb.TrainerHello] = []

    async def Train(self, requests, context) -> AsyncIterator[pb.TrainerCommand]:  # noqa: N802 - the RPC's name
        self.hellos.append((await anext(requests)).hello)
        yield pb.TrainerCommand(welcome=pb.TrainerWelcome(attempt=1, batch_groups=1, lease_seconds=0.3))
        await anext(requests)
        if len(self.hellos) > 1:
            yield pb.TrainerCommand(stop=pb.Stop(reason="done"))


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[Scheduler, str]]:
    server, servicer = make_server(TOKEN), Scheduler()
    add_SchedulerServicer_to_server(servicer, server)
    address = bind(server, port=0)
    await server.start()
    yield servicer, address
    await server.stop(None)


def _link(address: str, *, token: str = TOKEN, lost_after_s: float = 60.0) -> tuple[Session, Link]:
    identity = Identity(trainer_id="trainer-0", instance="i", weights_address="127.0.0.1:1")
    session = Session(identity, step=0, window_bytes=1000)
    where = Address(scheduler=address, token=token, lost_after_s=lost_after_s)
    return session, Link(session, address=where, recorder=Recorder(sink=None, metrics=None))


async def test_a_stream_that_breaks_is_opened_again_by_the_same_instance(scheduler):
    servicer, address = scheduler
    session, link = _link(address)
    await asyncio.wait_for(link.run(), 30)
    assert [hello.instance for hello in servicer.hellos] == ["i", "i"]
    with pytest.raises(StoppedError, match="done"):
        session.poll()


async def test_without_a_scheduler_it_gives_up_and_says_what_it_waited_for():
    session, link = _link("127.0.0.1:1", lost_after_s=0.3)
    begun_s = time.monotonic()
    await asyncio.wait_for(link.run(), 30)
    assert time.monotonic() - begun_s < 10
    with pytest.raises(RetryError, match=r"in vain for the scheduler: .*did not answer at 127.0.0.1:1"):
        session.wait_welcome()


async def test_another_runs_token_is_the_users_error(scheduler):
    _, address = scheduler
    _, link = _link(address, token="of another run")
    with pytest.raises(UserError, match="STREAMRL_TOKEN: is not the token of this run"):
        await asyncio.wait_for(link.run(), 30)


async def test_closing_ends_a_link_that_finds_nobody():
    _, link = _link("127.0.0.1:1", lost_after_s=0.2)
    link.close()
    await asyncio.wait_for(link.run(), 5)
