"""The scheduler alone: samples/s end to end, dispatch latency, trajectories' bytes/s, memory.

```
  this process ─┬─ scheduler, one core: real gRPC, core and journal; trivial prompts and rewards in its own process
                ├─ clients, another core: 256 generators that answer after one tick, a trainer that takes steps
                └─ bare grpc.aio server and reader: the same message sizes without a scheduler
```
`python benchmarks/scheduler.py` runs all three parts; with `--groups` it drives the core alone, by hand, at any size; `--soak` pushes a million samples through and prints the
scheduler's memory. Engines and pool are trivial, so that what is measured is the scheduler.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from run_folders import simulated_job

from streamrl import keys
from streamrl.spec import parse_job

HERE = Path(__file__).parent
TOKEN = "benchmark"  # noqa: S105 - a local benchmark
GROUP_SIZE = 8
SOAK_SAMPLES = 1_000_000
READY_TIMEOUT_S = 60.0
CORE_TIMEOUT_S = 7200.0
TRANSFER_TURNS = 5
"""Scheduler and bare stream in turn: the ratio of one turn is noisy."""
SATURATING_TICK_S = 0.25
"""256 generators x 16 slots a tick: more than one core can do."""
STEADY_TICK_S = 1.5
"""The same at about 2,500 samples/s: here latency means something."""


def job(*, batch_groups: int, steps: int) -> dict[str, Any]:
    """A job of simulated parts; only scheduling matters here."""
    scheduling = {"leaseSeconds": 60.0, "maxBufferBytes": "2Gi"}
    return simulated_job("benchmark", pipeline={"batchGroups": batch_groups, "steps": steps}, scheduling=scheduling)


def prepare(document: dict[str, Any], folder: Path) -> Path:
    """A run folder."""
    folder.mkdir(parents=True)
    text = json.dumps(parse_job(document).model_dump(mode="json", by_alias=True, exclude_none=True))
    (folder / keys.FILE_JOB).write_text(text)
    return folder


def spawn(role: str, folder: Path, *args: object, core: int) -> subprocess.Popen[str]:
    """Start a part of the benchmark, pinned to one core."""
    return subprocess.Popen(
        [sys.executable, str(HERE / "scheduler_parts.py"), str(core), role, *map(str, args)],
        env=os.environ | {keys.ENV_RUN_DIR: str(folder), keys.ENV_TOKEN: TOKEN, keys.ENV_PROCESS: role},
        stdout=subprocess.PIPE,
        text=True,
    )


def address_of(role: str, folder: Path) -> str:
    """Where a part listens."""
    path = folder / keys.DIR_ENDPOINTS / f"{role}.json"
    end = time.monotonic() + READY_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{role} was not ready within {READY_TIMEOUT_S:g} s")
        time.sleep(0.02)
    return str(json.loads(path.read_text())["grpc"])


def answer(child: subprocess.Popen[str], *, timeout_s: float) -> dict[str, Any]:
    """The JSON that a part prints at its end."""
    out, _ = child.communicate(timeout=timeout_s)
    document: dict[str, Any] = json.loads(out.splitlines()[-1])
    return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What part 1 puts on the scheduler."""

    samples: int
    queue: int
    generators: int
    tick_s: float
    """A generator's 16 slots finish once a tick: the pace of the load."""
    profile: str


def throughput(root: Path, load: Load) -> None:
    """Part 1: a deep queue, many generators."""
    samples, queue, generators = load.samples, load.queue, load.generators
    batch_groups = max(1, queue // (2 * GROUP_SIZE))
    steps = max(1, samples // (batch_groups * GROUP_SIZE))
    folder = prepare(job(batch_groups=batch_groups, steps=steps), root / f"throughput-{load.tick_s}")
    scheduler = spawn("scheduler", folder, load.profile, core=0)
    clients = spawn("clients", folder, address_of("scheduler", folder), generators, load.tick_s, core=1)
    memory = watch_memory(scheduler, clients)
    seen, own = answer(clients, timeout_s=60), answer(scheduler, timeout_s=60)
    print(f"queue {queue} samples, {generators} generators, {seen['samples']} samples in {seen['seconds']:.1f} s")
    print(f"  samples/s                     {seen['samples'] / seen['seconds']:.0f}")
    print(
        f"  scheduler CPU                 {own['cpu_s']:.1f} s = {own['cpu_s'] / seen['samples'] * 1e6:.0f} us a sample"
    )
    print(
        f"  dispatch p50 / p99 / max      {own['p50_ms']:.2f} / {own['p99_ms']:.2f} / {own['max_ms']:.2f} ms of {own['dispatches']}"
    )
    print(f"  event loop lag p99 / max      {own['lag_p99_ms']:.2f} / {own['lag_max_ms']:.2f} ms")
    print(f"  journal                       {(folder / keys.FILE_JOURNAL).stat().st_size / 1e6:.1f} MB")
    print(f"  memory, MB, by tenths of time {memory_line(memory)}")


def watch_memory(scheduler: subprocess.Popen[str], clients: subprocess.Popen[str]) -> list[int]:
    """Resident bytes of the scheduler, every half second, until the clients are done."""
    process, memory = psutil.Process(scheduler.pid), []
    while clients.poll() is None and scheduler.poll() is None:
        memory.append(process.memory_info().rss)
        time.sleep(0.5)
    return memory


def memory_line(memory: list[int]) -> str:
    """Ten readings."""
    stride = max(1, -(-len(memory) // 10))
    return " ".join(f"{size / 1e6:.0f}" for size in memory[::stride])


def transfer(root: Path, *, groups: int, tokens: int) -> None:
    """Part 2: finished groups to the trainer, and the same sizes over a bare stream."""
    folder = prepare(job(batch_groups=groups, steps=1), root / "transfer")
    subprocess.run(
        [
            sys.executable,
            str(HERE / "scheduler_parts.py"),
            "0",
            "fill",
            str(folder / keys.FILE_JOURNAL),
            str(groups),
            str(tokens),
        ],
        check=True,
    )
    scheduler = spawn("scheduler", folder, "", core=0)
    real = answer(spawn("drain", folder, address_of("scheduler", folder), groups, core=1), timeout_s=120)
    scheduler.kill()
    scheduler.wait()
    server = spawn("bare", folder, groups, tokens, core=0)
    bare = answer(spawn("read_bare", folder, address_of("bare", folder), core=1), timeout_s=120)
    server.kill()
    server.wait()
    rates = [part["bytes"] / part["seconds"] / 1e6 for part in (real, bare)]
    print(f"{groups} groups of {real['bytes'] // groups} bytes to the trainer")
    print(f"  scheduler / bare, MB/s        {rates[0]:.0f} / {rates[1]:.0f} = {100 * rates[0] / rates[1]:.0f} %")


def alone(root: Path, *, generators: int, groups: int) -> None:
    """The core alone, and the pages: what grows with generators and groups. Seconds are of CPU."""
    folder = prepare(job(batch_groups=1, steps=1000), root / f"core-{generators}-{groups}")
    table = answer(spawn("core", folder, generators, groups, core=0), timeout_s=CORE_TIMEOUT_S)
    print(f"{generators:,} generators, {groups:,} groups")
    for part, told in table.items():
        each = f"{told['cpu_s'] / told['count'] * 1e6:>10,.0f} us each"
        kept = f"{told['bytes']:,} bytes" if "bytes" in told else f"{told['rss_mb']:,.0f} MB resident"
        print(f"  {part:<30} {told['count']:>9,} {each}, longest {told['max_ms']:>8,.1f} ms, {kept}")


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--queue", type=int, default=100_000)
    parser.add_argument("--generators", type=int, default=256)
    parser.add_argument("--groups", type=int, default=0, help="so many live groups: the core alone, without processes")
    parser.add_argument("--soak", action="store_true", help="at least a million samples; watch the memory")
    parser.add_argument("--profile", default="", help="file for the scheduler's cProfile")
    args = parser.parse_args()
    load = Load(
        samples=args.samples,
        queue=args.queue,
        generators=args.generators,
        tick_s=SATURATING_TICK_S,
        profile=args.profile,
    )
    with tempfile.TemporaryDirectory(prefix="streamrl-benchmark-") as directory:
        root = Path(directory)
        if args.groups:
            alone(root, generators=args.generators, groups=args.groups)
            return
        if args.soak:
            throughput(root, replace(load, samples=max(SOAK_SAMPLES, args.samples), queue=20_000))
            return
        print("as fast as it goes:")
        throughput(root, load)
        print("at a steady load:")
        throughput(root, replace(load, tick_s=STEADY_TICK_S))
        for turn in range(TRANSFER_TURNS):
            transfer(root / f"turn-{turn}", groups=1000, tokens=512)


if __name__ == "__main__":
    main()
