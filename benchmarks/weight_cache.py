"""What a weight cache spares the trainer: generators that pull one version at once, each a process, from a server process on this machine.

    python benchmarks/weight_cache.py [--megabytes 256] [--generators 4]

Without a cache, with an empty one that they share, and again with what is in it then. Seconds are of the slowest, from a common start.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import Nearby, pull
from streamrl_workers.weights.store import WeightStore

TENSOR_BYTES = 4 * 2**20
TOKEN = "benchmark"  # noqa: S105 - on this machine, for this run
CONTEXT = multiprocessing.get_context("spawn")


def serving(pipe: Connection, size_bytes: int) -> None:
    store = WeightStore()
    random = (memoryview(os.urandom(TENSOR_BYTES)) for _ in range(size_bytes // TENSOR_BYTES))
    tensors = {f"w{number}": TensorBytes("uint8", (TENSOR_BYTES,), data) for number, data in enumerate(random)}
    version = store.publish(attempt=1, step=0, tensors=tensors)
    address = HttpWeightServer(store, token=TOKEN).address
    pipe.send(pb.WeightsAvailable(version=version, address=address).SerializeToString())
    threading.Event().wait()


async def pulled(target: pb.WeightsAvailable, cache: WeightCache | None) -> tuple[int, int]:
    """(tensors, bytes that came from the server)."""
    arrived: list[int] = []
    nearby = Nearby(cache=cache)

    def connect(_: pb.WeightsAvailable) -> Awaitable[HttpSource]:
        return HttpSource.connect(target.address, tls=None, token=TOKEN, role="trainer")

    def told(_: pb.WeightsAvailable, size_bytes: int) -> None:
        arrived.append(size_bytes)

    tensors = await pull(Route(target), timeout_s=600, connect=connect, arrived=told, nearby=nearby)
    return len(tensors), sum(arrived)


def generator(number: int, target: bytes, directory: str | None, start: Barrier, pipe: Connection) -> None:
    cache = None
    if directory is not None:
        cache = WeightCache(Path(directory), most_bytes=2**40, name=str(number), was_read=lambda _: None)
    start.wait()
    begun_s = time.perf_counter()
    tensors, arrived_bytes = asyncio.run(pulled(pb.WeightsAvailable.FromString(target), cache))
    pipe.send((time.perf_counter() - begun_s, arrived_bytes))
    while directory is not None and len(list(Path(directory).glob("blake3/[!.]*"))) < tensors:
        time.sleep(0.05)  # nothing is written any more when the process has ended


def at_once(generators: int, target: bytes, directory: str | None) -> tuple[float, int]:
    """Seconds of the slowest, bytes from the server."""
    start = CONTEXT.Barrier(generators)
    pipes = [CONTEXT.Pipe() for _ in range(generators)]
    processes = [
        CONTEXT.Process(target=generator, args=(number, target, directory, start, theirs))
        for number, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    results = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return max(took_s for took_s, _ in results), sum(arrived for _, arrived in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--generators", type=int, default=4)
    args = parser.parse_args()
    ours, theirs = CONTEXT.Pipe()
    size_bytes = args.megabytes * 10**6 // TENSOR_BYTES * TENSOR_BYTES
    server = CONTEXT.Process(target=serving, args=(theirs, size_bytes), daemon=True)
    server.start()
    target = ours.recv()
    print(
        f"{args.generators} generators, {size_bytes / 1e6:.0f} MB\n\n| cache | s | copies from the trainer |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as directory:
        for name, shared in (("none", None), ("empty", directory), ("warm", directory)):
            took_s, arrived = at_once(args.generators, target, shared)
            print(f"| {name} | {took_s:.2f} | {arrived / size_bytes:.2f} |", flush=True)
    server.kill()


if __name__ == "__main__":
    main()
