"""What a version of the weights costs: its hash, its way over gRPC, its swap.

    python benchmarks/weights.py [--megabytes 400] [--repeats 5]

The hash of one tensor by BLAKE2b (as earlier releases took it), by BLAKE3 on one thread and on all processors. The pull of
a version from a server process on this machine, verified. And how long an engine generates nothing while a version is
swapped in: as it is, and with what earlier releases did then, a copy of each tensor and the hash of all of the engine's bytes.
The kinds take turns within each repeat; the figures are medians.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from blake3 import blake3
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.models.published import Parameters
from streamrl_workers.stream.channel import bind, make_server
from streamrl_workers.stream.services import WEIGHTS, serve
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash
from streamrl_workers.weights.pull import pull
from streamrl_workers.weights.server import WeightsService, WeightStore

SIZES_BYTES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "256 MiB": 2**28}
CHUNK_BYTES = 2**20
TENSOR_BYTES = 16 * 2**20
TOKEN = "benchmark"  # noqa: S105 - on this machine, for this run


def medians(kinds: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Seconds of each kind; the first round warms up."""
    measured: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats + 1):
        for name, run in kinds.items():
            begun_s = time.perf_counter()
            run()
            measured[name].append(time.perf_counter() - begun_s)
    return {name: statistics.median(times[1:]) for name, times in measured.items()}


def hashes(repeats: int) -> None:
    print(f"| tensor | BLAKE2b | BLAKE3, one thread | BLAKE3, all {os.cpu_count()} processors |\n|---|---|---|---|")
    for name, size_bytes in SIZES_BYTES.items():
        data = memoryview(bytearray(os.urandom(2**16)) * (size_bytes // 2**16))
        times = medians(
            {
                "blake2b": lambda data=data: hashlib.blake2b(data, digest_size=16).digest(),
                "one": lambda data=data: blake3(data).digest(),
                "all": lambda data=data: bytes_hash(data),
            },
            repeats=repeats,
        )
        print(f"| {name} | " + " | ".join(f"{size_bytes / one_s / 1e9:.2f} GB/s" for one_s in times.values()) + " |")


def published(size_bytes: int) -> dict[str, TensorBytes]:
    """A version in tensors of one size."""
    data = memoryview(os.urandom(2**16) * (TENSOR_BYTES // 2**16))
    return {f"w{i}": TensorBytes("uint8", (TENSOR_BYTES,), data) for i in range(size_bytes // TENSOR_BYTES)}


async def serve_weights(pipe: Connection, size_bytes: int) -> None:
    store = WeightStore()
    version = store.publish(attempt=1, step=0, tensors=published(size_bytes))
    server = make_server(TOKEN)
    serve(server, WEIGHTS, WeightsService(store))
    address = bind(server, port=0)
    await server.start()
    pipe.send((address, version.SerializeToString()))
    await asyncio.Event().wait()


def serving(pipe: Connection, size_bytes: int) -> None:
    asyncio.run(serve_weights(pipe, size_bytes))


def pulls(size_bytes: int, *, repeats: int) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serving, args=(theirs, size_bytes), daemon=True)
    process.start()
    address, name = ours.recv()
    version = pb.VersionName.FromString(name)

    def once() -> None:
        target = pb.WeightsAvailable(version=version, address=address)
        asyncio.run(pull(target, timeout_s=600, chunk_bytes=CHUNK_BYTES, token=TOKEN))

    took_s = medians({"pull": once}, repeats=repeats)["pull"]
    process.kill()
    print(f"\npull of {size_bytes / 1e6:.0f} MB, verified: {took_s:.2f} s, {size_bytes / took_s / 1e9:.2f} GB/s")


def swaps(size_bytes: int, *, repeats: int) -> None:
    hidden = 1024
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=size_bytes // (8 * hidden), hidden_size=hidden, num_hidden_layers=0)
    )
    parameters = Parameters(model)
    tensors = {name: tensor._replace(data=_writable(tensor.data)) for name, tensor in parameters.snapshot().items()}

    def before() -> None:
        parameters.load({name: tensor._replace(data=_writable(tensor.data)) for name, tensor in tensors.items()})
        for tensor in model.state_dict().values():
            hashlib.blake2b(tensor.numpy(), digest_size=16).digest()

    times = medians({"before": before, "now": lambda: parameters.load(tensors)}, repeats=repeats)
    print(f"\nswap of {size_bytes / 1e6:.0f} MB: {times['before']:.3f} s before, {times['now']:.3f} s now")


def _writable(data: memoryview) -> memoryview:
    return memoryview(bytearray(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    hashes(args.repeats)
    pulls(args.megabytes * 10**6, repeats=args.repeats)
    swaps(args.megabytes * 10**6, repeats=args.repeats)


if __name__ == "__main__":
    main()
