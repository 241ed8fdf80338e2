"""A version through a directory beside one over HTTP, on one machine.

    python benchmarks/weight_folder.py [--megabytes 256] [--repeats 5] [--directory DIRECTORY]

Versions whose bytes all differ are published and pulled in one process by both transports, in turns, verified. HTTP goes without
TLS. Times are medians; writing is what a version is announced later by.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.folder import FolderSource, FolderWeightServer
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import pull
from streamrl_workers.weights.source import Source
from streamrl_workers.weights.store import WeightStore

TOKEN = "benchmark"  # noqa: S105 - of this process alone
TENSOR_BYTES = 4 * 2**20
TIMEOUT_S = 600.0


def version(size_bytes: int) -> dict[str, TensorBytes]:
    """Tensors of one size, no two alike."""
    return {
        f"w{number}": TensorBytes("uint8", (TENSOR_BYTES,), memoryview(os.urandom(TENSOR_BYTES)))
        for number in range(size_bytes // TENSOR_BYTES)
    }


def http(address: str) -> Awaitable[Source]:
    return HttpSource.connect(address, tls=None, token=TOKEN, role="trainer")


def pull_s(name: pb.VersionName, address: str, connect: Callable[[str], Awaitable[Source]]) -> float:
    begun_s = time.perf_counter()
    route = Route(pb.WeightsAvailable(version=name, address=address))
    asyncio.run(pull(route, timeout_s=TIMEOUT_S, connect=lambda target: connect(target.address)))
    return time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="on a disk or a mount; absent = a temporary one")
    args = parser.parse_args()
    size_bytes = args.megabytes * 2**20
    times: dict[str, list[float]] = {"write": [], "folder": [], "http": []}
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        store = WeightStore(newest_kept=1)
        over_http = HttpWeightServer(store, token=TOKEN)
        folder = FolderWeightServer(store, url=directory, run="run", owner="0" * 32, newest_kept=1, timeout_s=TIMEOUT_S)
        for step in range(args.repeats + 1):  # the first warms up
            name = store.publish(attempt=1, step=step, tensors=version(size_bytes))
            begun_s = time.perf_counter()
            folder.offer(name, ended=lambda: False)
            times["write"].append(time.perf_counter() - begun_s)
            times["folder"].append(pull_s(name, folder.address, FolderSource.connect))
            times["http"].append(pull_s(name, over_http.address, http))
        over_http.close()
    print(f"{size_bytes / 1e6:.0f} MB\n\n| | s | GB/s |\n|---|---|---|")
    for kind, found in times.items():
        took_s = statistics.median(found[1:])
        print(f"| {kind} | {took_s:.2f} | {size_bytes / took_s / 1e9:.2f} |")


if __name__ == "__main__":
    main()
