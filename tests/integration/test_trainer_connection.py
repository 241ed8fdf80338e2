"""The trainer's link over real gRPC: a scheduler that is away, that refuses, that goes and comes back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.stream.channel import MAX_BREAKS, SCHEDULER, Backoff, bind, make_server, serve
from streamrl_workers.stream.messages import frames
from streamrl_workers.stream.scheduler_link import SchedulerAddress
from streamrl_workers.trainer.engines.engine import RetryError
from streamrl_workers.trainer.scheduler_connection import SchedulerConnection
from streamrl_workers.trainer.session import Session, StoppedError

TOKEN = "secret"
WAIT_S = 120.0


class Scheduler:
    """Welcomes; closes the stream after the first event behind hello, stops the run on the second connection."""

    def __init__(self) -> None:
        self.hellos: list[pb.TrainerHello] = []

    async def Train(self, requests, context) -> AsyncIterator[pb.Frame]:  # noqa: N802 - the RPC's name
        self.hellos.append(pb.TrainerEvent.FromString((await anext(requests)).data).hello)
        yield _frame(welcome=pb.TrainerWelcome(attempt=1, batch_groups=1, lease_seconds=0.3))
        await anext(requests)
        if len(self.hellos) > 1:
            yield _frame(stop=pb.Stop(reason="done"))


def _frame(**command: Any) -> pb.Frame:
    (frame,) = frames(pb.TrainerCommand(**command).SerializeToString())
    return frame


@pytest.fixture
async def scheduler() -> AsyncIterator[tuple[Scheduler, str]]:
    server, servicer = make_server(TOKEN), Scheduler()
    serve(server, SCHEDULER, servicer)
    address = bind(server, port=0)
    await server.start()
    yield servicer, address
    await server.stop(None)


def _link(address: str, *, token: str = TOKEN, lost_after_s: float = 60.0) -> tuple[Session, SchedulerConnection]:
    identity = pb.TrainerHello(trainer_id="trainer-0", instance="i", weights_address="127.0.0.1:1")
    session = Session(identity, step=0, window_bytes=1000)
    where = SchedulerAddress(scheduler=address, token=token, lost_after_s=lost_after_s)
    return session, SchedulerConnection(session, address=where, recorder=Recorder(sink=None, metrics=None))


async def test_a_stream_that_breaks_is_opened_again_by_the_same_instance(scheduler):
    servicer, address = scheduler
    session, link = _link(address)
    await asyncio.wait_for(link.run(), WAIT_S)
    assert [hello.instance for hello in servicer.hellos] == ["i", "i"]
    with pytest.raises(StoppedError, match="done"):
        session.poll()


async def test_without_a_scheduler_it_gives_up_and_says_what_it_waited_for():
    session, link = _link("127.0.0.1:1", lost_after_s=0.3)
    await asyncio.wait_for(link.run(), WAIT_S)
    with pytest.raises(RetryError, match=r"awaited the scheduler at 127.0.0.1:1 for \d+ s; last: .*did not answer"):
        session.wait_welcome()


async def test_another_runs_token_is_the_users_error(scheduler):
    _, address = scheduler
    _, link = _link(address, token="of another run")
    with pytest.raises(UserError, match="STREAMRL_TOKEN: is not the token of the scheduler"):
        await asyncio.wait_for(link.run(), WAIT_S)


async def test_closing_ends_a_link_that_finds_nobody():
    _, link = _link("127.0.0.1:1", lost_after_s=2 * WAIT_S)
    link.close()
    await asyncio.wait_for(link.run(), WAIT_S)


class Refusing:
    """Ends every connection behind its welcome."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    async def Train(self, requests, context) -> AsyncIterator[pb.Frame]:  # noqa: N802 - the RPC's name
        await anext(requests)
        yield _frame(welcome=pb.TrainerWelcome(attempt=1, batch_groups=1, lease_seconds=30.0))
        await context.abort(self._code, "this cannot be said")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "refuses this trainer: INVALID_ARGUMENT: this cannot be said"),
        (grpc.StatusCode.FAILED_PRECONDITION, "refuses this trainer: FAILED_PRECONDITION: this cannot be said"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "refuses this trainer: RESOURCE_EXHAUSTED: this cannot be said"),
        (grpc.StatusCode.ABORTED, f"the connection to the scheduler broke {MAX_BREAKS} times"),
    ],
)
async def test_a_trainer_that_cannot_say_what_it_has_to_ends(code, reason: str, monkeypatch):
    """A refusal that meets a write half-way is a break to grpc's client: the next connection hears it."""
    monkeypatch.setattr(Backoff, "next_pause_s", lambda _backoff: 0.0)
    server = make_server(TOKEN)
    serve(server, SCHEDULER, Refusing(code))
    address = bind(server, port=0)
    await server.start()
    session, link = _link(address)
    await asyncio.wait_for(link.run(), WAIT_S)
    await server.stop(None)
    with pytest.raises(RetryError, match=reason):
        session.poll()
