"""The clock of a loop that was stopped: what was missed does not count, and what has arrived comes first."""

import asyncio
import socket
from random import Random

from streamrl_workers.process.awake_loop import STALL_S, AwakeClock, AwakeLoop


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_span_counts_up_to_its_bound() -> None:
    real = FakeTime()
    clock = AwakeClock(real)
    begun_s = clock.time()
    clock.begin_span(10.0)
    real.now_s += 3.0
    assert clock.time() - begun_s == 3.0
    real.now_s += 3600.0
    assert clock.time() - begun_s == 10.0
    clock.begin_span(STALL_S)
    real.now_s += 3600.0
    clock.begin_span(10.0)
    assert clock.time() - begun_s == 10.0 + STALL_S


def test_it_never_falls_and_never_runs_ahead() -> None:
    chance, real = Random(5), FakeTime()
    clock = AwakeClock(real)
    last_s, origin_s = clock.time(), real.now_s - clock.time()
    for _ in range(2000):
        real.now_s += chance.choice([0.0, 0.01, 1.0, 50.0])
        if chance.random() < 0.5:
            clock.begin_span(chance.choice([0.0, STALL_S, 5.0]))
        assert last_s <= clock.time() <= real.now_s - origin_s
        last_s = clock.time()


def test_what_arrived_during_a_stall_is_read_before_a_deadline_falls() -> None:
    async def read_late() -> bytes:
        loop = asyncio.get_running_loop()
        near, far = socket.socketpair()
        near.setblocking(False)
        with near, far:
            reading = asyncio.create_task(asyncio.wait_for(loop.sock_recv(near, 10), timeout=1.0))
            await asyncio.sleep(0)  # it waits now
            far.send(b"alive")
            stall(loop, seconds=5.0)
            return await reading

    def stall(loop: asyncio.AbstractEventLoop, *, seconds: float) -> None:
        """The process is away: its clock goes on and its callbacks do not."""
        assert isinstance(loop, AwakeLoop)
        clock = loop._awake
        before = clock._clock_s
        clock._clock_s = lambda: before() + seconds

    with asyncio.Runner(loop_factory=AwakeLoop) as runner:
        assert runner.run(read_late()) == b"alive"


def test_its_deadlines_fall() -> None:
    async def wait() -> float:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            await asyncio.wait_for(loop.create_future(), timeout=0.6)
        except TimeoutError:
            return loop.time() - begun_s
        raise AssertionError("it must not end")

    with asyncio.Runner(loop_factory=AwakeLoop) as runner:
        assert runner.run(wait()) >= 0.6
