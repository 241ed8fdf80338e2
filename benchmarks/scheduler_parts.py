"""The processes of `benchmarks/scheduler.py`: the scheduler with a trivial pool, its clients, a bare stream.

Each role prints one line of JSON at its end.
"""

import asyncio
import cProfile
import gc
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import scheduler_core

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import effects as fx
from streamrl_workers.scheduler import main as scheduler_main
from streamrl_workers.scheduler import records as rec
from streamrl_workers.scheduler.journal.writer import JournalWriter
from streamrl_workers.scheduler.server import service
from streamrl_workers.scheduler.server.connections import Context, Events, PeerLink
from streamrl_workers.scheduler.settings import SchedulerEnvironment
from streamrl_workers.stream.auth import call_metadata
from streamrl_workers.stream.channel import SCHEDULER, Client, bind, client, connect, make_server, serve
from streamrl_workers.stream.messages import Joiner, frames, write
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.stream.run_folder import write_endpoint
from streamrl_workers.tasks.values import NeedPrompts, Prompt, Request, Result, Score, ScoreSample

TOKENS = 64
SLOTS = 16
CONNECT_S = 30.0
GENERATORS_PER_CHANNEL = 16
CREDIT_BYTES = 1 << 34
ISSUE_TAG = pb.GeneratorCommand.ISSUE_FIELD_NUMBER << 3 | 2
"""First byte of a serialized IssueBatch command."""


class TrivialPool:
    """Prompts and rewards that cost nothing."""

    held_out_size: int | None = None
    fingerprint: Mapping[str, str] = MappingProxyType({})

    def __init__(self) -> None:
        self._done: list[Result] = []
        self._there = asyncio.Event()

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def put(self, request: Request) -> None:
        """Numbered questions; every second sample is right."""
        if isinstance(request, NeedPrompts):
            wanted = range(request.first_index, request.first_index + request.count)
            self._done += [Prompt(split=request.split, index=i, text=f"question {i}") for i in wanted]
        elif isinstance(request, ScoreSample):
            reward = float(request.sample_index % 2)
            self._done.append(
                Score(group_id=request.group_id, sample_index=request.sample_index, reward=reward, parts={})
            )
        self._there.set()

    async def results(self) -> Sequence[Result]:
        """All that was asked since the last call."""
        await self._there.wait()
        self._there.clear()
        done, self._done = self._done, []
        return done


class Stopwatch:
    """Dispatch latency: from a ProgressBatch in our hands to the next IssueBatch on that link written out."""

    def __init__(self) -> None:
        self.dispatch_s: list[float] = []
        self.lag_s: list[float] = []
        self._freed: dict[str, float] = {}
        took, wrote = service._Generator._on_progress, PeerLink._write_one

        def on_progress(generator: service._Generator, batch: pb.ProgressBatch) -> None:
            self._freed.setdefault(generator.entry.link.peer, time.perf_counter())
            took(generator, batch)

        async def write_one(link: PeerLink, write: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
            await wrote(link, write, data)
            if data[0] == ISSUE_TAG and link.peer in self._freed:
                self.dispatch_s.append(time.perf_counter() - self._freed.pop(link.peer))

        service._Generator._on_progress = on_progress  # type: ignore[method-assign]
        PeerLink._write_one = write_one  # type: ignore[method-assign]

    async def watch_lag(self) -> None:
        """How late the loop wakes a sleeper."""
        while True:
            due_s = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            self.lag_s.append(time.perf_counter() - due_s)


def quantile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


async def run_scheduler() -> None:
    """Role `scheduler`: until the run is over."""
    gc.set_threshold(*scheduler_main._GC_THRESHOLDS)
    environment = SchedulerEnvironment.read(os.environ)
    job = scheduler_main.read_job(environment.run_dir / "job.json")
    watch = Stopwatch()
    lag = asyncio.create_task(watch.watch_lag(), name="lag")
    await scheduler_main.serve(environment, job=job, make_pool=lambda _job, _dir: TrivialPool())
    lag.cancel()
    numbers = {
        "cpu_s": time.process_time(),
        "dispatches": len(watch.dispatch_s),
        "p50_ms": quantile(watch.dispatch_s, 0.5),
        "p99_ms": quantile(watch.dispatch_s, 0.99),
        "max_ms": quantile(watch.dispatch_s, 1.0),
        "lag_p99_ms": quantile(watch.lag_s, 0.99),
        "lag_max_ms": quantile(watch.lag_s, 1.0),
    }
    print(json.dumps(numbers))


class FakeGenerator:
    """Answers every request at its next tick."""

    tokens = pack_int32(range(TOKENS))
    logprobs = pack_float32([-0.5] * TOKENS)

    def __init__(self, number: int, stub: Client, *, tick_s: float) -> None:
        self._id = f"generator-sim-{number}"
        self._call = stub.Generate(metadata=call_metadata(os.environ["STREAMRL_TOKEN"]))
        self._joiner = Joiner(pb.GeneratorCommand)
        self._writing = asyncio.Lock()
        self._active: list[pb.SampleRequest] = []
        self._version = pb.VersionName()
        self._tick_s = tick_s
        self._phase_s = tick_s * (number % 64) / 64

    async def run(self) -> None:
        """Until told to stop."""
        hello = pb.GeneratorHello(generator_id=self._id, instance="1", pool="sim", slots=SLOTS)
        await write(self._call, pb.GeneratorEvent(hello=hello))
        ticks = asyncio.create_task(self._ticks(), name=self._id)
        try:
            while (command := await self._joiner.read(self._call)) is not None and not command.HasField("stop"):
                if command.HasField("issue"):
                    self._active.extend(command.issue.items)
                elif command.HasField("weights"):
                    self._version = command.weights.version
                    await self._say(pb.GeneratorEvent(weights_loaded=pb.WeightsLoaded(version=self._version)))
        finally:
            ticks.cancel()

    async def _ticks(self) -> None:
        await asyncio.sleep(self._phase_s)
        while True:
            await asyncio.sleep(self._tick_s)
            ended, self._active = self._active, []
            if ended:
                batch = pb.ProgressBatch(items=[self.finished(request.lease, self._version) for request in ended])
                await self._say(pb.GeneratorEvent(progress=batch))

    async def _say(self, event: pb.GeneratorEvent) -> None:
        async with self._writing:
            await write(self._call, event)

    @classmethod
    def finished(cls, lease: int, version: pb.VersionName) -> pb.Progress:
        """A sample's end."""
        span = pb.VersionSpan(tokens=TOKENS, step=version.step, attempt=version.attempt)
        return pb.Progress(
            lease=lease,
            tokens=cls.tokens,
            logprobs=cls.logprobs,
            spans=[span],
            finish_reason="stop",
            text="4",
            prompt_tokens=cls.tokens[:64],
            generate_s=0.1,
        )


class FakeTrainer:
    """Takes a step as soon as it has the groups, and says that a checkpoint covers it."""

    def __init__(self, stub: Client, *, stop_at_groups: int = 0, window_bytes: int | None = None) -> None:
        """`window_bytes`: of groups that it takes before it has paid for them, as the real one does; None: no bound."""
        self._call = stub.Train(metadata=call_metadata(os.environ["STREAMRL_TOKEN"]))
        self._joiner = Joiner(pb.TrainerCommand)
        self._stop_at_groups = stop_at_groups
        self._window_bytes = window_bytes
        self.samples = 0
        self.bytes = 0
        self.first_s = self.last_s = self.credit_s = 0.0
        self._attempt = self._batch = self._step = 0
        self._groups: list[int] = []

    async def run(self) -> None:
        """Until told to stop."""
        await self._say(hello=pb.TrainerHello(trainer_id="t", instance="1", weights_address="-"))
        while (command := await self._joiner.read(self._call)) is not None and not command.HasField("stop"):
            if command.HasField("welcome"):
                self._attempt, self._batch = command.welcome.attempt, command.welcome.batch_groups
                await self._publish()
                self.credit_s = time.perf_counter()
                await self._say(credit=pb.Credit(bytes=self._window_bytes or CREDIT_BYTES))
            elif command.HasField("group"):
                if self._take(command.group):
                    return
                if self._window_bytes and not command.group.more:
                    await self._say(credit=pb.Credit(bytes=command.group.size_bytes))
                if len(self._groups) == self._batch:
                    await self._take_step()

    async def _say(self, **event: Any) -> None:  # noqa: ANN401 - any event of the trainer
        await write(self._call, pb.TrainerEvent(**event))

    def _take(self, group: pb.Group) -> bool:
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.samples += len(group.samples)
        self.bytes += group.ByteSize()
        if not group.more:
            self._groups.append(group.group_id)
        return 0 < self._stop_at_groups == len(self._groups)

    async def _take_step(self) -> None:
        done = pb.StepDone(step=self._step, group_ids=self._groups)
        await self._say(step_done=done)
        while (command := await self._joiner.read(self._call)) is not None and not command.HasField("step_recorded"):
            assert not command.HasField("restart"), command.restart.reason
        self._groups, self._step = [], self._step + 1
        await self._publish()
        covered = pb.Checkpointed(step=self._step, path=f"step-{self._step}", exported=True, oldest_step=self._step)
        await self._say(checkpointed=covered)

    async def _publish(self) -> None:
        version = pb.VersionName(attempt=self._attempt, step=self._step)
        await self._say(published=pb.Published(version=version))


async def run_clients(address: str, generators: int, tick_s: float) -> None:
    """Role `clients`: all generators and the trainer."""
    count = 1 + generators // GENERATORS_PER_CHANNEL
    channels = [await connect(address, timeout_s=CONNECT_S, who="the scheduler") for _ in range(count)]
    trainer = FakeTrainer(client(channels[0], SCHEDULER))
    began_s = time.perf_counter()
    fakes = [
        FakeGenerator(number, client(channels[number % len(channels)], SCHEDULER), tick_s=tick_s)
        for number in range(generators)
    ]
    tasks = [asyncio.create_task(fake.run(), name="generator") for fake in fakes]
    await trainer.run()
    await asyncio.gather(*tasks)
    print(json.dumps({"samples": trainer.samples, "seconds": trainer.last_s - began_s}))


async def run_drain(address: str, groups: int) -> None:
    """Role `drain`: take finished groups, nothing else."""
    channel = await connect(address, timeout_s=CONNECT_S, who="the scheduler")
    trainer = FakeTrainer(client(channel, SCHEDULER), stop_at_groups=groups)
    await trainer.run()
    print(json.dumps({"bytes": trainer.bytes, "seconds": trainer.last_s - trainer.credit_s}))


def sample(group_id: int, index: int, tokens: int) -> pb.Sample:
    """A finished sample."""
    return pb.Sample(
        group_id=group_id,
        sample_index=index,
        prompt_tokens=pack_int32(range(32)),
        tokens=pack_int32(range(tokens)),
        logprobs=pack_float32([-0.5] * tokens),
        spans=[pb.VersionSpan(tokens=tokens, step=0, attempt=1)],
        finish_reason="stop",
        reward=float(index % 2),
        generator_id="generator-sim-0",
    )


async def fill(path: str, groups: int, tokens: int) -> None:
    """Role `fill`: a journal with finished groups."""
    journal = JournalWriter(Path(path), limit_bytes=1 << 30)
    journal.open()
    journal.start(on_committed=lambda _sequence: None, on_fault=print)
    for group in range(groups):
        samples = tuple(sample(group, index, tokens).SerializeToString() for index in range(8))
        size_bytes = sum(map(len, samples))
        records: list[rec.Record] = [
            rec.Planned(group_id=group, prompt_index=group, prompt_key=group + 1),
            rec.Scored(group_id=group, start_version=0, trajectories=samples, size_bytes=size_bytes),
        ]
        for number, record in enumerate(records):
            journal.append(fx.Write(sequence=2 * group + number + 1, record=record))
    journal.close()


class BareService:
    """Sends prepared messages as fast as the stream takes them."""

    def __init__(self, messages: list[pb.TrainerCommand]) -> None:
        self._messages = messages

    async def Train(self, events: Events, context: Context) -> None:  # noqa: N802 - generated name
        """Send all."""
        await anext(events)
        for message in self._messages:
            for frame in frames(message.SerializeToString()):
                await context.write(frame)


async def run_bare(groups: int, tokens: int) -> None:
    """Role `bare`: a server without a scheduler."""
    messages = [
        pb.TrainerCommand(group=pb.Group(group_id=g, samples=[sample(g, i, tokens) for i in range(8)], size_bytes=1))
        for g in range(groups)
    ]
    server = make_server(os.environ["STREAMRL_TOKEN"])
    address = bind(server, port=0)
    serve(server, SCHEDULER, BareService(messages))
    await server.start()
    write_endpoint(Path(os.environ["STREAMRL_RUN_DIR"]), process="bare", grpc=address, signals=None)
    await server.wait_for_termination()


async def read_bare(address: str) -> None:
    """Role `read_bare`: count what a bare stream brings."""
    channel = await connect(address, timeout_s=CONNECT_S, who="the bare server")
    call = client(channel, SCHEDULER).Train(metadata=call_metadata(os.environ["STREAMRL_TOKEN"]))
    began_s, size_bytes = time.perf_counter(), 0
    await write(call, pb.TrainerEvent(credit=pb.Credit(bytes=1)))
    joiner = Joiner(pb.TrainerCommand)
    while (command := await joiner.read(call)) is not None:
        size_bytes += command.group.ByteSize()
    print(json.dumps({"bytes": size_bytes, "seconds": time.perf_counter() - began_s}))


def main(core: str, role: str, *args: str) -> None:
    """Run one role, pinned to a core."""
    os.sched_setaffinity(0, {int(core) % (os.cpu_count() or 1)})
    if role == "scheduler":
        profile = cProfile.Profile() if args[0] else None
        if profile:
            profile.enable()
        asyncio.run(run_scheduler())
        if profile:
            profile.dump_stats(args[0])
        return
    roles = {
        "clients": lambda: run_clients(args[0], int(args[1]), float(args[2])),
        "drain": lambda: run_drain(args[0], int(args[1])),
        "fill": lambda: fill(args[0], int(args[1]), int(args[2])),
        "core": lambda: scheduler_core.run_core(int(args[0]), int(args[1])),
        "bare": lambda: run_bare(int(args[0]), int(args[1])),
        "read_bare": lambda: read_bare(args[0]),
    }
    asyncio.run(roles[role]())


if __name__ == "__main__":
    main(*sys.argv[1:])
