"""When a generator is ready: connected, and with weights."""

import asyncio
from dataclasses import dataclass

from streamrl.metrics import GENERATOR, WORKER_LABELS
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import SimulatedEngineSpec as Spec
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines.simulated import SimulatedEngine
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.generator.status import GeneratorStatus
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.metrics.signals import WallMetrics
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.hashing import TensorBytes, tensors_hash
from streamrl_workers.weights.pull import VersionGoneError

DEADLINE_S = 120.0
WEIGHTS = {"w": TensorBytes("uint8", (1,), memoryview(b"1"))}
LOST = 3
"""This version does not arrive."""


async def pull(route: Route) -> dict[str, TensorBytes]:
    if route.target.version.step == LOST:
        raise VersionGoneError("gone")
    return WEIGHTS


@dataclass
class Link:
    """As far as a health check asks."""

    fault: str = ""

    def ill(self) -> str:
        return self.fault


async def test_it_is_ready_with_weights_and_as_long_as_it_is_connected() -> None:
    metrics = WallMetrics(GENERATOR, common=dict.fromkeys(WORKER_LABELS, "x"))
    recorder = Recorder(sink=None, metrics=None)
    status = GeneratorStatus(recorder, metrics=metrics)
    fault = status.signals().fault
    assert fault() == "the model is being loaded"
    engine = SimulatedEngine(spec=Spec.model_validate({"timeScale": 0.0}), slots=2, seed=0)
    outbox, link = GeneratorOutbox(), Link()
    loop = EngineLoop(engine, pull=pull, outbox=outbox, recorder=recorder)
    outbox.open()
    status.attach(loop, link=link)  # type: ignore[arg-type] # all that is asked
    loop.connected()
    task = asyncio.create_task(loop.run(), name="engine-loop")
    try:
        assert fault() == "no weights have been loaded yet"
        await announced(0, loop=loop, outbox=outbox)
        assert fault() == ""
        await announced(LOST, loop=loop, outbox=outbox)
        assert fault() == "weights of version (1, 3) failed: gone", "those in the engine are not current"
        await announced(4, loop=loop, outbox=outbox)
        assert fault() == ""
        link.fault = "no scheduler"
        assert fault() == "no scheduler"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def announced(step: int, *, loop: EngineLoop, outbox: GeneratorOutbox) -> None:
    """Until the generator has said what became of this version."""
    version = pb.VersionName(attempt=1, step=step, hash=tensors_hash(WEIGHTS))
    loop.announce(pb.WeightsAvailable(version=version, address="a:1"))
    async with asyncio.timeout(DEADLINE_S):
        await outbox.filled.wait()
    outbox.pop(running=False)
