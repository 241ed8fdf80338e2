"""A real generator process with the simulated engine, and a scheduler and a server of weights in the test's own loop."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.channel import SCHEDULER, bind, make_server, serve
from streamrl_workers.stream.messages import Joiner, frames
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.store import WeightStore
from support.jobs import simulated_job
from support.ports import free_port
from support.runs import DEADLINE_S

TOKEN = "secret"
NAME = "generator-sim-0"
LEASE_S = 120.0
"""A link waits so long for its welcome, which is as late as the test that gives it."""


class TinyScheduler:
    """Says what it is told to, keeps what it hears."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[pb.GeneratorEvent] = asyncio.Queue()
        self.context: Any = None
        self.refusal: tuple[Any, str] | None = None
        """Status and text for every hello."""

    async def Generate(self, request_iterator, context):  # noqa: N802
        self.context = context
        joiner = Joiner(pb.GeneratorEvent)
        async for frame in request_iterator:
            if (event := joiner.take(frame)) is not None:
                self.heard.put_nowait(event)
            if self.refusal is not None:
                await context.abort(*self.refusal)

    async def say(self, **command: Any) -> None:
        for frame in frames(pb.GeneratorCommand(**command).SerializeToString()):
            await self.context.write(frame)


@dataclass
class Lease:
    """What arrived about one lease."""

    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # (step, tokens)
    prompts: list[bytes] = field(default_factory=list)
    end: pb.Progress | None = None


@dataclass
class Bench:
    """Everything that a test touches."""

    scheduler: TinyScheduler
    server: grpc.aio.Server
    address: str
    store: WeightStore
    weights_address: str
    process: asyncio.subprocess.Process
    run_dir: Path
    leases: dict[int, Lease] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    """What was heard, in order: `end 5`, `loaded 1`, `failed 1`, `drained`, `hello`."""
    last: dict[str, Any] = field(default_factory=dict)
    """Newest message of each kind."""

    async def hear(self, what: str) -> Any:
        """Listen until `what` has been heard (an entry of `order`)."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while what not in self.order:
                    self._note(await self.scheduler.heard.get())
        except TimeoutError:
            raise AssertionError(f"waited {DEADLINE_S} s for {what!r}, heard {self.order}") from None
        return self.last[what.split(maxsplit=1)[0]]

    async def greet(self, *, lease_s: float = LEASE_S) -> pb.GeneratorHello:
        """Hear a new hello and welcome it."""
        self.order.clear()
        hello = await self.hear("hello")
        await self.scheduler.say(welcome=pb.GeneratorWelcome(lease_seconds=lease_s))
        return hello

    def publish(self, step: int) -> pb.VersionName:
        data = memoryview(bytes([step]) * 1000)
        return self.store.publish(attempt=1, step=step, tensors={"w": TensorBytes("uint8", (1000,), data)})

    async def announce(self, step: int, *, address: str | None = None) -> None:
        weights = pb.WeightsAvailable(version=self.publish(step), address=address or self.weights_address)
        await self.scheduler.say(weights=weights)

    async def issue(self, *leases: int, prefix: bytes = b"", pinned: Sequence[int] = ()) -> None:
        sampling = pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=10_000)
        items = [
            pb.SampleRequest(
                lease=lease,
                group_id=lease,
                prompt=f"prompt {lease}",
                sampling=sampling,
                seed=lease,
                prefix_tokens=prefix,
                pinned=lease in pinned,
            )
            for lease in leases
        ]
        await self.scheduler.say(issue=pb.IssueBatch(items=items))

    async def exit_code(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    async def restart_scheduler(self) -> None:
        """The scheduler dies and comes back at the same address."""
        await self.server.stop(grace=None)
        self.scheduler = TinyScheduler()
        self.server, _ = await _serve(scheduler=self.scheduler, port=int(self.address.rsplit(":", 1)[1]))

    def _note(self, event: pb.GeneratorEvent) -> None:
        kind = event.WhichOneof("event")
        message = getattr(event, kind)
        if kind == "progress":
            for item in message.items:
                self._progress(item)
            return
        name = kind.removeprefix("weights_")
        self.last[name] = message
        self.order.append(f"{name} {message.version.step}" if kind.startswith("weights") else name)

    def _progress(self, item: pb.Progress) -> None:
        lease = self.leases.setdefault(item.lease, Lease())
        assert lease.end is None, f"progress of lease {item.lease} after its end"
        lease.tokens += unpack_int32(item.tokens)
        lease.spans += [(span.step, span.tokens) for span in item.spans]
        lease.prompts.append(item.prompt_tokens)
        self.last["progress"] = item
        self.order.append(f"progress {item.lease}")
        if item.finish_reason:
            lease.end = self.last["end"] = item
            self.order.append(f"end {item.lease}")


async def _serve(*, scheduler: TinyScheduler, port: int) -> tuple[grpc.aio.Server, str]:
    server = make_server(TOKEN)
    serve(server, SCHEDULER, scheduler)
    address = bind(server, port=port)
    await server.start()
    return server, address


async def start_generator(
    run_dir: Path, *, address: str, token: str = TOKEN, **environment: str
) -> asyncio.subprocess.Process:
    """The process, with its output in `generator.log`."""
    env = {
        **os.environ,
        keys.ENV_RUN_DIR: str(run_dir),
        keys.ENV_PROCESS: NAME,
        keys.ENV_POOL: "sim",
        keys.ENV_SCHEDULER_ADDRESS: address,
        keys.ENV_TOKEN: token,
        **environment,
    }
    with (run_dir / "generator.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "streamrl_workers.generator", env=env, stdout=log, stderr=log
        )


@asynccontextmanager
async def generator_bench(run_dir: Path, **engine: Any) -> AsyncIterator[Bench]:
    """A generator of `engine` (fields of the simulated engine), dialled in or about to."""
    document = simulated_job(**{"slots": 4, "sigma": 0.0, "meanTokens": 50.0, **engine})
    document["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    (run_dir / keys.FILE_JOB).write_text(json.dumps(document))
    store = WeightStore()
    weights = HttpWeightServer(store, token=TOKEN)
    scheduler = TinyScheduler()
    server, address = await _serve(scheduler=scheduler, port=free_port())
    process = await start_generator(run_dir, address=address)
    bench = Bench(
        scheduler=scheduler,
        server=server,
        address=address,
        store=store,
        weights_address=weights.address,
        process=process,
        run_dir=run_dir,
    )
    try:
        yield bench
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await bench.server.stop(grace=None)
        weights.close()
