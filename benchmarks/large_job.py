"""A simulated job of the size of a 70B model: do messages, memory and ticks of the scheduler stay within their bounds?

```
  this process ─┬─ scheduler: the real one, real gRPC, core and journal; prompts of 70 KB and rewards that cost nothing
                └─ clients: generators that stream partial tokens each second, a trainer that takes steps
```
    python benchmarks/large_job.py [--groups 1024] [--group-size 16] [--steps 4] [--generators 16] [--slots 256]

Lengths are log-normal (median 6,000 tokens, sigma 1), cut at 32,768. Prints the largest message of each direction beside its limit, the
scheduler's resident memory by tenths of the run beside what its bounds add up to, and the longest ticks: one callback of the event loop,
in CPU time of its thread (what a busy machine takes away is not the scheduler's) and by the clock.
"""

import argparse
import asyncio
import gc
import heapq
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from run_folders import simulated_job
from scheduler import TOKEN, address_of, answer, memory_line, prepare, watch_memory
from scheduler_parts import CONNECT_S, FakeTrainer, TrivialPool

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.scheduler import main as scheduler_main
from streamrl_workers.scheduler.server.connections import PeerLink
from streamrl_workers.scheduler.server.peer_messages import Door
from streamrl_workers.scheduler.settings import SchedulerEnvironment
from streamrl_workers.stream.auth import call_metadata
from streamrl_workers.stream.channel import SCHEDULER, Client, client, connect
from streamrl_workers.stream.messages import MESSAGE_BYTES, Joiner, write
from streamrl_workers.stream.packing import batches, pack_float32, pack_int32
from streamrl_workers.tasks.values import Prompt, Result

MAX_TOKENS, MEDIAN_TOKENS, SIGMA = 32_768, 6_000.0, 1.0
PROMPT_CHARS, CHARS_PER_TOKEN = 70_000, 4
CHUNK_TOKENS, INTERVAL_S = 2_048, 1.0
"""What a running sample gains between two messages: a generator tells of it each second."""
KV_TOKENS_PER_SLOT = 10_000
BUFFER_BYTES = 2**30
WINDOW_BYTES = 64 * 2**20
"""Of groups on their way to the trainer."""
SHOWN_TICKS = 5
PORTION = 32
"""Results of the task pool that come at once."""
TIMEOUT_S = 3_000.0
MB = 1e6


class LongPrompts(TrivialPool):
    """Prompts of the job's size, a few at a time, as they come from other processes."""

    async def results(self) -> Sequence[Result]:
        await asyncio.sleep(0)  # others have their turn in between, as where results come from a pipe
        done = await super().results()
        now, self._done = list(done[:PORTION]), [*done[PORTION:], *self._done]
        if self._done:
            self._there.set()
        return [_long(one) if isinstance(one, Prompt) else one for one in now]


def _long(prompt: Prompt) -> Prompt:
    return replace(prompt, text=f"{prompt.index:08} ".ljust(PROMPT_CHARS, "x"))


class Ticks:
    """The longest callbacks of the event loop, and the largest messages."""

    def __init__(self) -> None:
        self.longest: list[tuple[float, float, str]] = []  # CPU seconds, seconds, what
        self.sent_bytes = self.heard_bytes = 0
        ran, wrote, parsed = asyncio.Handle._run, PeerLink._write_one, Joiner._parsed

        def run(handle: asyncio.Handle) -> None:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            ran(handle)
            took = time.thread_time() - cpu_s, time.perf_counter() - wall_s, _name(handle)
            (heapq.heappush if len(self.longest) < SHOWN_TICKS else heapq.heappushpop)(self.longest, took)

        async def write_one(link: PeerLink, send: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
            self.sent_bytes = max(self.sent_bytes, len(data))
            await wrote(link, send, data)

        def parse(joiner: Joiner[Any], data: bytes) -> Any:  # noqa: ANN401 - any message
            self.heard_bytes = max(self.heard_bytes, len(data))
            return parsed(joiner, data)

        asyncio.Handle._run = run  # type: ignore[method-assign]
        PeerLink._write_one = write_one  # type: ignore[method-assign]
        Joiner._parsed = parse  # type: ignore[method-assign]


def _name(handle: asyncio.Handle) -> str:
    task = getattr(handle._callback, "__self__", None)
    return task.get_name() if isinstance(task, asyncio.Task) else repr(handle._callback)[:60]


async def run_scheduler() -> None:
    """Role `scheduler`: until the run is over."""
    gc.set_threshold(*scheduler_main._GC_THRESHOLDS)
    environment = SchedulerEnvironment.read(os.environ)
    job = scheduler_main.read_job(environment.run_dir / keys.FILE_JOB)
    ticks = Ticks()
    await scheduler_main.serve(environment, job=job, make_pool=lambda _job, _dir: LongPrompts())
    longest = [(1e3 * cpu_s, 1e3 * wall_s, what) for cpu_s, wall_s, what in sorted(ticks.longest, reverse=True)]
    numbers = {"sent_bytes": ticks.sent_bytes, "heard_bytes": ticks.heard_bytes, "ticks": longest}
    print(json.dumps(numbers | {"cpu_s": time.process_time()}))


class StreamingGenerator:
    """Streams partial tokens of all that it holds, at each interval."""

    tokens = pack_int32(range(CHUNK_TOKENS))
    logprobs = pack_float32([-0.5] * CHUNK_TOKENS)
    prompt = pack_int32(range(PROMPT_CHARS // CHARS_PER_TOKEN))

    def __init__(self, number: int, stub: Client, *, slots: int) -> None:
        self._random = Random(number)
        self._hello = pb.GeneratorHello(
            generator_id=f"generator-sim-{number}",
            instance="1",
            pool="sim",
            slots=slots,
            kv_capacity_tokens=slots * KV_TOKENS_PER_SLOT,
            shares_prompts=True,
        )
        self._call = stub.Generate(metadata=call_metadata(os.environ[keys.ENV_TOKEN]))
        self._joiner = Joiner(pb.GeneratorCommand)
        self._writing = asyncio.Lock()
        self._active: dict[int, tuple[int, int, int]] = {}  # lease -> group, tokens so far, tokens at the end
        self._version = pb.VersionName()
        self.most_kv = 0.0
        """Share of its memory for keys and values that was taken."""

    async def run(self) -> None:
        """Until told to stop."""
        await write(self._call, pb.GeneratorEvent(hello=self._hello))
        ticks = asyncio.create_task(self._ticks(), name=self._hello.generator_id)
        try:
            while (command := await self._joiner.read(self._call)) is not None and not command.HasField("stop"):
                if command.HasField("issue"):
                    self._active |= {one.lease: (one.group_id, 0, self._length()) for one in command.issue.items}
                elif command.HasField("weights"):
                    self._version = command.weights.version
                    await self._say(pb.GeneratorEvent(weights_loaded=pb.WeightsLoaded(version=self._version)))
        finally:
            ticks.cancel()

    def _length(self) -> int:
        return min(MAX_TOKENS, 1 + int(MEDIAN_TOKENS * self._random.lognormvariate(0.0, SIGMA)))

    async def _ticks(self) -> None:
        await asyncio.sleep(self._random.random() * INTERVAL_S)
        while True:
            await asyncio.sleep(INTERVAL_S)
            items = [self._gain(lease) for lease in list(self._active)]
            for batch in batches(items, size_bytes=pb.Progress.ByteSize):
                await self._say(pb.GeneratorEvent(progress=pb.ProgressBatch(items=batch)))
            used = sum(done for _, done, _ in self._active.values())
            used += len({group for group, _, _ in self._active.values()}) * (PROMPT_CHARS // CHARS_PER_TOKEN)
            self.most_kv = max(self.most_kv, used / self._hello.kv_capacity_tokens)
            await self._say(pb.GeneratorEvent(heartbeat=pb.Heartbeat(active=len(self._active), kv_used_tokens=used)))

    async def _say(self, event: pb.GeneratorEvent) -> None:
        async with self._writing:
            await write(self._call, event)

    def _gain(self, lease: int) -> pb.Progress:
        group, done, end = self._active.pop(lease)
        count = min(CHUNK_TOKENS, end - done)
        ends = done + count == end
        if not ends:
            self._active[lease] = group, done + count, end
        return pb.Progress(
            lease=lease,
            tokens=self.tokens[: 4 * count],
            logprobs=self.logprobs[: 4 * count],
            spans=[pb.VersionSpan(tokens=count, step=self._version.step, attempt=self._version.attempt)],
            finish_reason="stop" if ends else "",
            text="x" * (CHARS_PER_TOKEN * end) if ends else "",
            prompt_tokens=b"" if done else self.prompt,
        )


async def run_clients(address: str, generators: int, slots: int) -> None:
    """Role `clients`: all generators, each with a connection, and the trainer."""
    stub = client(await connect(address, timeout_s=CONNECT_S, who="the scheduler"), SCHEDULER)
    trainer = FakeTrainer(stub, window_bytes=WINDOW_BYTES)
    began_s = time.perf_counter()
    fakes = [
        StreamingGenerator(
            number, client(await connect(address, timeout_s=CONNECT_S, who="the scheduler"), SCHEDULER), slots=slots
        )
        for number in range(generators)
    ]
    tasks = [asyncio.create_task(fake.run(), name="generator") for fake in fakes]
    await trainer.run()
    await asyncio.gather(*tasks)
    most_kv = max(fake.most_kv for fake in fakes)
    seconds = trainer.last_s - began_s
    print(json.dumps({"samples": trainer.samples, "bytes": trainer.bytes, "seconds": seconds, "most_kv": most_kv}))


def job(*, groups: int, group_size: int, steps: int) -> dict[str, Any]:
    """The job's document."""
    scheduling = {"leaseSeconds": 60.0, "maxBufferBytes": str(BUFFER_BYTES)}
    made = simulated_job("large", pipeline={"batchGroups": groups, "steps": steps}, scheduling=scheduling)
    made["spec"]["task"] |= {"groupSize": group_size, "sampling": {"maxTokens": MAX_TOKENS}}
    return made


def spawn(role: str, folder: Path, *args: object) -> subprocess.Popen[str]:
    """Start a part."""
    return subprocess.Popen(
        [sys.executable, __file__, "--role", role, *map(str, args)],
        env=os.environ | {keys.ENV_RUN_DIR: str(folder), keys.ENV_TOKEN: TOKEN, keys.ENV_PROCESS: role},
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(args: argparse.Namespace, folder: Path) -> None:
    """Run both parts and print the table."""
    prepare(job(groups=args.groups, group_size=args.group_size, steps=args.steps), folder)
    scheduler = spawn("scheduler", folder)
    clients = spawn("clients", folder, address_of("scheduler", folder), args.generators, args.slots)
    memory = watch_memory(scheduler, clients)
    seen, own = answer(clients, timeout_s=TIMEOUT_S), answer(scheduler, timeout_s=TIMEOUT_S)
    door = Door(max_tokens=MAX_TOKENS, batch_groups=args.groups, newest_step=lambda: 0)
    texts = 4 * args.groups * PROMPT_CHARS
    print(f"{seen['samples']} samples, {seen['bytes'] / MB:.0f} MB to the trainer, in {seen['seconds']:.0f} s")
    print(f"  largest message sent          {own['sent_bytes'] / MB:.2f} MB of {MESSAGE_BYTES / MB:.0f} MB")
    print(
        f"  largest message of a generator {own['heard_bytes'] / MB:.2f} MB of {door.generator_limit_bytes / MB:.0f} MB"
    )
    print(f"  memory, MB, by tenths of time {memory_line(memory)}")
    print(f"  its bounds, MB                {BUFFER_BYTES / MB:.0f} of samples, {texts / MB:.0f} of prompts")
    print(f"  scheduler CPU                 {own['cpu_s']:.0f} s")
    print(f"  most KV of a generator        {100 * seen['most_kv']:.0f} % of its capacity")
    for cpu_ms, wall_ms, what in own["ticks"]:
        print(f"  longest tick, CPU / clock     {cpu_ms:.0f} / {wall_ms:.0f} ms: {what}")


def main() -> None:
    """Run a role, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=1024)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--generators", type=int, default=16)
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is None:
        with tempfile.TemporaryDirectory(prefix="streamrl-benchmark-") as directory:
            measure(args, Path(directory) / "run")
    elif args.role[0] == "scheduler":
        asyncio.run(run_scheduler())
    else:
        asyncio.run(run_clients(args.role[1], int(args.role[2]), int(args.role[3])))


if __name__ == "__main__":
    main()
