"""What a scrape of the scheduler costs with many generators: seconds until its page for Prometheus is there, and its own processor time.

`python benchmarks/scrape.py` — the scheduler and the clients of `benchmarks/scheduler.py`, a thousand generators of 16 slots. Three lines:

    the page    the real core and status endpoint in this process, its page by HTTP; `CPU`: processor time to make it, which a busy machine
                does not change
    at rest     all generators hold their samples: nothing but the scrapes takes time; `CPU` is the scheduler's, of one scrape
    under load  the slots end once in `LOADED_TICK_S`: a scrape waits for what the loop does just then

`--profile FILE` writes the scheduler's cProfile of the time at rest.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil
from scheduler import GROUP_SIZE, address_of, job, prepare, spawn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from streamrl import keys
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_job
from streamrl_workers.metrics.signals import Signals, SignalsServer
from streamrl_workers.scheduler.server.connections import Connections, GeneratorEntry, PeerLink
from streamrl_workers.scheduler.server.rates import BeatWindow
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from support.core_world import World, settings  # found by the line above

RESTING_TICK_S = 3600.0
LOADED_TICK_S = 16.0
"""A thousand generators × 16 slots: a thousand samples a second."""
PAUSE_S = 0.1
"""Between two scrapes."""
LEASE_S = 600.0
"""Generators that hold their samples say nothing."""
DEADLINE_S = 900.0


def page(url: str) -> bytes:
    """What a scrape gets."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:  # noqa: S310 - the benchmark's own scheduler
        return bytes(answer.read())


def until_connected(address: str, generators: int, *, running: int) -> None:
    """Until all are there and at work."""
    end = time.monotonic() + DEADLINE_S
    while True:
        numbers = json.loads(page(f"http://{address}/numbers"))
        if len(numbers["generators"]) == generators and numbers["running"] >= running:
            return
        if time.monotonic() > end:
            raise TimeoutError(f"{len(numbers['generators'])} generators, {numbers['running']} samples run")
        time.sleep(1.0)


def processor_s(process: psutil.Process) -> float:
    """That it has used so far."""
    used = process.cpu_times()
    return float(used.user + used.system)


async def in_process(root: Path, *, generators: int, pages: int) -> str:
    """One line about pages of a core in this process."""
    pool = "p"  # the world's
    document = job(batch_groups=2, steps=1)
    document["spec"]["generators"][0]["name"] = pool
    rules = settings(group_size=GROUP_SIZE, batch_groups=2, staleness=0, steps=1, evaluation_prompts=0)
    world, connections = World(rules, slots=(16,)), Connections()
    for number in range(generators):
        name = f"generator-{number}"
        world.join_generator(name)
        hello = pb.GeneratorHello(generator_id=name, instance="1", pool=pool, slots=16)
        beats = BeatWindow(60.0)
        connections.add(GeneratorEntry(link=PeerLink(name), hello=hello, version_step=0, beats=beats))
    status = StatusEndpoint(world.core, job=parse_job(document), connections=connections, run_dir=root)
    status.metrics()
    begun_s = time.process_time()
    for _ in range(pages):
        status.metrics()
    cpu_s = (time.process_time() - begun_s) / pages
    server = SignalsServer(Signals(metrics=status.metrics, status=dict, fault=str))
    port = await server.start(host="127.0.0.1", port=0)
    took = [await asyncio.to_thread(scrape, f"127.0.0.1:{port}") for _ in range(pages)]
    await server.close()
    status.close()
    return line(took, cpu_s=cpu_s)


def scrape(address: str) -> tuple[float, int]:
    """Seconds and bytes."""
    begun_s = time.perf_counter()
    size_bytes = len(page(f"http://{address}/metrics"))
    return time.perf_counter() - begun_s, size_bytes


def line(took: Sequence[tuple[float, int]], *, cpu_s: float) -> str:
    """What scrapes took."""
    by_clock = [seconds for seconds, _ in took]
    p50, p99 = statistics.median(by_clock), statistics.quantiles(by_clock, n=100)[-1]
    figures = f"{1e3 * p50:.1f} / {1e3 * p99:.1f} / {1e3 * max(by_clock):.1f} ms, CPU {1e3 * cpu_s:.1f} ms"
    return f"p50 / p99 / max {figures}, {took[-1][1]} bytes"


def measure(root: Path, *, generators: int, scrapes: int, tick_s: float, profile: str) -> str:
    """One line about so many scrapes."""
    slots = 16 * generators
    document = job(batch_groups=slots // GROUP_SIZE, steps=1_000)
    document["spec"]["scheduling"]["leaseSeconds"] = LEASE_S
    folder = prepare(document, root / f"tick-{tick_s:g}")
    scheduler = spawn("scheduler", folder, profile, core=0)
    clients: subprocess.Popen[str] | None = None
    try:
        clients = spawn("clients", folder, address_of("scheduler", folder), generators, tick_s, core=1)
        address = json.loads((folder / keys.DIR_ENDPOINTS / "scheduler.json").read_text())["signals"]
        until_connected(address, generators, running=slots if tick_s == RESTING_TICK_S else 1)
        process, took = psutil.Process(scheduler.pid), []
        before_s = processor_s(process)
        for _ in range(scrapes):
            took.append(scrape(address))
            time.sleep(PAUSE_S)
        cpu_s = (processor_s(process) - before_s) / scrapes
    finally:
        for child in (clients, scheduler):
            if child is not None:
                child.terminate()
                child.wait(DEADLINE_S)
    return line(took, cpu_s=cpu_s)


def main() -> None:
    """Both, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generators", type=int, default=1_000)
    parser.add_argument("--scrapes", type=int, default=200)
    parser.add_argument("--profile", default="", help="file for the scheduler's cProfile")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-benchmark-") as directory:
        told = asyncio.run(in_process(Path(directory), generators=args.generators, pages=args.scrapes))
        print(f"the page: {told}", flush=True)
        for name, tick_s in (("at rest", RESTING_TICK_S), ("under load", LOADED_TICK_S)):
            told = measure(
                Path(directory),
                generators=args.generators,
                scrapes=args.scrapes,
                tick_s=tick_s,
                profile=args.profile if tick_s == RESTING_TICK_S else "",
            )
            print(f"{name}: {told}", flush=True)


if __name__ == "__main__":
    main()
