"""The engine loop: refused weights, a full outbox, faults. Wrong bytes do not come so far (`tests/integration/test_weights.py`)."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import SimulatedEngineSpec as Spec
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines.simulated import SimulatedEngine
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.hashing import TensorBytes, tensors_hash
from support.engine_requests import request

DEADLINE_S = 120.0


class Choosy(SimulatedEngine):
    """Refuses step 2."""

    def load_weights(self, *, version, tensors):
        if version == 2:
            raise ValueError("shape of w differs")
        return super().load_weights(version=version, tensors=tensors)


def tensors(step: int) -> dict[str, TensorBytes]:
    return {"w": TensorBytes("uint8", (1,), memoryview(bytes([step])))}


async def pull(route: Route) -> dict[str, TensorBytes]:
    return tensors(route.target.version.step)


def announced(step: int) -> pb.WeightsAvailable:
    return pb.WeightsAvailable(
        version=pb.VersionName(attempt=1, step=step, hash=tensors_hash(tensors(step))), address="a:1"
    )


class HalfLoaded(SimulatedEngine):
    """Cannot keep its old weights when it refuses the next."""

    def load_weights(self, *, version, tensors):
        if version > 0:
            raise UserError(field="engine.vllm", rule="cannot run the weights of spec.model: an expert was left out")
        return super().load_weights(version=version, tensors=tensors)


class Gated(Choosy):
    """Is in a step until it is let go."""

    steps = 0

    def step(self):
        self.steps += 1
        self.entered.release()
        assert self.gate.acquire(timeout=DEADLINE_S)
        return super().step()


@asynccontextmanager
async def running(kind=Choosy):
    engine = kind(spec=Spec.model_validate({"timeScale": 0.0, "meanTokens": 3.0, "sigma": 0.0}), slots=2, seed=0)
    engine.entered, engine.gate = threading.Semaphore(0), threading.Semaphore(0)
    outbox = GeneratorOutbox()
    loop = EngineLoop(engine, pull=pull, outbox=outbox, recorder=Recorder(sink=None, metrics=None))
    outbox.open()
    loop.connected()
    task = asyncio.create_task(loop.run(), name="engine-loop")
    try:
        yield loop, outbox, task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def heard(outbox: GeneratorOutbox) -> list[pb.GeneratorEvent]:
    async with asyncio.timeout(DEADLINE_S):
        await outbox.filled.wait()
    return outbox.pop(running=False)


async def test_refused_weights_leave_the_old_ones():
    async with running() as (loop, outbox, _):
        loop.announce(announced(0))
        assert (await heard(outbox))[0].weights_loaded.version.step == 0
        loop.announce(announced(2))
        assert "shape of w differs" in (await heard(outbox))[0].weights_failed.error
        loop.issue([request(lease) for lease in range(9)])  # more than slots, all of them end at once
        leases = set()
        while leases != set(range(9)):
            leases |= {item.lease for event in await heard(outbox) for item in event.progress.items}
        assert loop.status().version == announced(0).version


async def test_an_engine_that_refuses_the_first_weights_ends_as_the_users_error():
    async with running() as (loop, _, task):
        loop.announce(announced(2))
        with pytest.raises(UserError, match=r"spec\.generators.*shape of w differs"):
            async with asyncio.timeout(DEADLINE_S):
                await task


async def test_an_engine_that_cannot_keep_the_old_weights_ends_as_the_users_error():
    async with running(HalfLoaded) as (loop, outbox, task):
        loop.announce(announced(0))
        await heard(outbox)
        loop.announce(announced(1))
        with pytest.raises(UserError, match="an expert was left out"):
            async with asyncio.timeout(DEADLINE_S):
                await task


async def test_a_full_outbox_pauses_the_engine(monkeypatch):
    monkeypatch.setattr("streamrl_workers.generator.outbox._MAX_UNSENT_BYTES", 40)
    async with running() as (loop, outbox, _):
        loop.announce(announced(0))
        await heard(outbox)
        loop.issue([request(lease) for lease in range(50)])
        leases: list[int] = []
        while len(leases) < 50:
            (event,) = await heard(outbox)
            leases += [item.lease for item in event.progress.items]
            assert len(event.progress.items) <= 4
            loop.sent()
    assert leases == list(range(50))


async def test_a_paused_generator_ends_its_step_and_makes_nothing_until_it_goes_on():
    async with running(Gated) as (loop, outbox, _):
        engine = loop._engine
        loop.announce(announced(0))
        await heard(outbox)
        loop.issue([request(lease) for lease in range(4)])
        assert await asyncio.to_thread(engine.entered.acquire, timeout=DEADLINE_S)
        loop.pause(paused=True)
        loop.announce(announced(1))
        engine.gate.release(9)
        assert await ended(outbox) == {0: 0, 1: 0}, "the step that was under way"
        assert (await heard(outbox))[0].weights_loaded.version.step == 1, "weights are swapped all the same"
        assert (engine.steps, loop.status().active, loop.status().waiting) == (1, 0, 2)
        loop.pause(paused=False)
        assert await ended(outbox) == {2: 1, 3: 1}
        assert engine.steps == 2


class Watchful(SimulatedEngine):
    """Remembers whether it is paused, and takes nothing then."""

    is_paused = False

    def pause(self, *, paused):
        self.is_paused = paused
        super().pause(paused=paused)

    def add(self, requests):
        assert not self.is_paused
        return super().add(requests)


async def test_an_engine_goes_on_before_it_is_given_what_came_in_the_pause():
    async with running(Watchful) as (loop, outbox, _):
        loop.pause(paused=True)
        loop.announce(announced(0))
        await heard(outbox)
        assert loop._engine.is_paused
        loop.issue([request(7)])
        loop.pause(paused=False)
        assert await ended(outbox) == {7: 0}


async def ended(outbox: GeneratorOutbox) -> dict[int, int]:
    """Lease -> version, of what has ended next."""
    items = [item for event in await heard(outbox) for item in event.progress.items]
    return {item.lease: item.spans[0].step for item in items}


async def test_a_fault_of_the_pull_is_not_swallowed():
    async with running() as (loop, _, task):
        loop._puller._pull = _faulty
        loop.announce(announced(0))
        with pytest.raises(RuntimeError, match="a bug"):
            async with asyncio.timeout(DEADLINE_S):
                await task


async def _faulty(_route: Route) -> dict[str, TensorBytes]:
    raise RuntimeError("a bug")
