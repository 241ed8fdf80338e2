"""What a version of the weights costs: its hash, its way over HTTP, its swap.

    python benchmarks/weights.py [--megabytes 400] [--repeats 5]

The hash of one tensor by BLAKE2b (as earlier releases took it), by BLAKE3 on one thread and on all processors. The pull of
a version from a server process on this machine, with mutual TLS and verified, beside one bare TLS stream of as many bytes: their seconds, the
processor time of both ends, and the pulling process's peak of memory. The same by eight generators in a row, each with a link of its own speed. And how long an engine generates nothing while a version is
swapped in: as it is, and with what earlier releases did then, a copy of each tensor and the hash of all of the engine's bytes.
The kinds take turns within each repeat; the figures are medians.
"""

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import resource
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from blake3 import blake3

from streamrl.proto import stream_pb2 as pb
from streamrl_operator.planning.certificates import Lives
from streamrl_operator.tls_secrets import Holder, new_ca, new_leaf
from streamrl_workers.stream.auth import Role
from streamrl_workers.stream.tls import Tls
from streamrl_workers.weights.address import Connect, Route
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash
from streamrl_workers.weights.http_client import HttpSource
from streamrl_workers.weights.http_server import HttpWeightServer
from streamrl_workers.weights.pull import Nearby, pull
from streamrl_workers.weights.store import RelayStore, WeightStore

SIZES_BYTES = {"64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "256 MiB": 2**28}
BUFFER_BYTES = 2**20
"""Of a bare stream."""
TENSOR_BYTES = 16 * 2**20


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


def serving(pipe: Connection, size_bytes: int, files: Path) -> None:
    """Weights, and bare streams of as many bytes; tells its processor time when asked."""
    store, tls = WeightStore(), Tls(files)
    version = store.publish(attempt=1, step=0, tensors=published(size_bytes))
    server = HttpWeightServer(store, token="", tls=tls)
    bare = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=stream, args=(bare, tls, size_bytes), daemon=True).start()
    pipe.send((server.address, bare.getsockname(), version.SerializeToString()))
    while pipe.recv():
        pipe.send(time.process_time())


def stream(door: socket.socket, tls: Tls, size_bytes: int) -> None:
    data = memoryview(os.urandom(BUFFER_BYTES))
    while True:
        with tls.ssl_context(server=True).wrap_socket(door.accept()[0], server_side=True) as connection:
            for begin in range(0, size_bytes, BUFFER_BYTES):
                connection.sendall(data[: size_bytes - begin])


def receive(address: tuple[str, int], tls: Tls, size_bytes: int) -> None:
    buffer, left = memoryview(bytearray(BUFFER_BYTES)), size_bytes
    with tls.ssl_context(server=False).wrap_socket(socket.create_connection(address)) as connection:
        while left:
            left -= connection.recv_into(buffer)


def pulling(pipe: Connection, target: bytes, bare: tuple[str, int], size_bytes: int, files: Path) -> None:
    """Seconds, processor time and growth of this process, once for each word."""
    tls, route = Tls(files), Route(pb.WeightsAvailable.FromString(target))
    kinds = {
        "bare": lambda: receive(bare, tls, size_bytes),
        "pull": lambda: asyncio.run(pull(route, timeout_s=600, connect=connecting(tls))),
    }
    kinds["bare"]()
    while kind := pipe.recv():
        before_bytes = psutil.Process().memory_info().rss
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        kinds[kind]()
        took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        pipe.send((took_s, cpu_s, peak_bytes - before_bytes))


def connecting(tls: Tls, *, cluster: str = "") -> Connect:
    """To trainers and peers."""

    def connect(target: pb.WeightsAvailable) -> Awaitable[HttpSource]:
        role: Role = "generator" if target.peer else "trainer"
        return HttpSource.connect(target.address, tls=tls, token="", role=role, cluster=cluster)

    return connect


def passing_on(pipe: Connection, files: Path, link_bytes_per_s: float) -> None:
    """A generator that pulls what it is told of, and passes it on over a link of its own."""
    tls, relay = Tls(files), RelayStore()
    server = HttpWeightServer(relay, token="", tls=tls, remote_bytes_per_s=link_bytes_per_s)
    pipe.send(server.address)
    while told := pipe.recv():
        route = Route(pb.WeightsAvailable.FromString(told))
        asyncio.run(pull(route, timeout_s=600, connect=connecting(tls, cluster="far"), nearby=Nearby(relay=relay)))
        pipe.send(time.monotonic())


def peers(size_bytes: int, *, generators: int, link_bytes_per_s: float) -> None:
    """One generator alone; several that all pull from the trainer; several in a row. Every server has a link of its own, of one speed."""
    context, tls_folder = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory()
    trainer, generator = certificates(Path(tls_folder.name))
    pipes, addresses, store = [], [], WeightStore()
    for _ in range(generators):
        ours, theirs = context.Pipe()
        context.Process(target=passing_on, args=(theirs, generator, link_bytes_per_s), daemon=True).start()
        pipes.append(ours)
        addresses.append(ours.recv())
    server = HttpWeightServer(store, token="", tls=Tls(trainer), remote_bytes_per_s=link_bytes_per_s)
    print(
        f"\n{size_bytes / 1e6:.0f} MB, mutual TLS, links of {link_bytes_per_s / 1e6:.0f} MB/s\n\n| | s | copies from the trainer |\n|---|---|---|"
    )
    for step, (name, count, in_a_row) in enumerate(
        [
            ("one", 1, True),
            (f"{generators} from the trainer", generators, False),
            (f"{generators} in a row", generators, True),
        ]
    ):
        version = store.publish(attempt=1, step=step, tensors=distinct(size_bytes))
        served_bytes, begun_s = server.served_bytes, time.monotonic()
        for place, pipe in enumerate(pipes[:count]):
            peer = in_a_row and place > 0
            address = addresses[place - 1] if peer else server.address
            pipe.send(pb.WeightsAvailable(version=version, address=address, peer=peer).SerializeToString())
        took_s = max(pipe.recv() for pipe in pipes[:count]) - begun_s
        print(f"| {name} | {took_s:.1f} | {(server.served_bytes - served_bytes) / size_bytes:.2f} |", flush=True)
    for pipe in pipes:
        pipe.send(b"")
    tls_folder.cleanup()


def distinct(size_bytes: int) -> dict[str, TensorBytes]:
    """Tensors of which no two are the same."""
    size = 2**20
    return {
        f"w{number}": TensorBytes("uint8", (size,), memoryview(os.urandom(size)))
        for number in range(size_bytes // size)
    }


def pulls(size_bytes: int, *, repeats: int) -> None:
    context = multiprocessing.get_context("spawn")
    size_bytes = size_bytes // TENSOR_BYTES * TENSOR_BYTES
    measured: dict[str, list[tuple[float, float, float]]] = {"bare": [], "pull": []}
    with tempfile.TemporaryDirectory() as folder:
        trainer, generator = certificates(Path(folder))
        serve_end, theirs = context.Pipe()
        server = context.Process(target=serving, args=(theirs, size_bytes, trainer), daemon=True)
        server.start()
        address, bare, name = serve_end.recv()
        target = pb.WeightsAvailable(version=pb.VersionName.FromString(name), address=address).SerializeToString()
        pull_end, theirs = context.Pipe()
        client = context.Process(target=pulling, args=(theirs, target, bare, size_bytes, generator), daemon=True)
        client.start()
        for _ in range(repeats):
            for kind, found in measured.items():
                serve_end.send("cpu")
                before_s = serve_end.recv()
                pull_end.send(kind)
                took_s, cpu_s, growth_bytes = pull_end.recv()
                serve_end.send("cpu")
                found.append((took_s, cpu_s + serve_end.recv() - before_s, growth_bytes))
        for process in (client, server):
            process.kill()
    print(
        f"\n{size_bytes / 1e6:.0f} MB, mutual TLS\n\n| | GB/s | processor seconds for 1 GB | memory / bytes |\n|---|---|---|---|"
    )
    names = {"bare": "one bare TLS stream, not verified", "pull": "pull, verified"}
    medians_of = {
        kind: [statistics.median(column) for column in zip(*rows, strict=True)] for kind, rows in measured.items()
    }
    for kind, (took_s, cpu_s, growth_bytes) in medians_of.items():
        memory = f"{growth_bytes / size_bytes:.2f}" if kind == "pull" else ""
        print(f"| {names[kind]} | {size_bytes / took_s / 1e9:.2f} | {cpu_s / size_bytes * 1e9:.2f} | {memory} |")
    ratios = [bare[0] / ours[0] for bare, ours in zip(*measured.values(), strict=True)]
    print(
        f"\npull / bare stream: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f} in {repeats} pairs)"
    )


def certificates(folder: Path) -> tuple[Path, Path]:
    """Directories with the files of a trainer and of a generator, from one authority."""
    now, lives = datetime.now(UTC), Lives(ca_s=86_400, leaf_s=86_400)
    ca = new_ca("j", now=now, lives=lives)
    made = []
    for role in ("trainer", "generator"):
        leaf = new_leaf(Holder(namespace="n", job="j", role=role), ca=ca, now=now, lives=lives)
        directory = folder / role
        directory.mkdir()
        for file, data in {"ca.crt": ca.certificate, "tls.crt": leaf.certificate, "tls.key": leaf.key}.items():
            (directory / file).write_bytes(data)
        made.append(directory)
    return made[0], made[1]


def swaps(size_bytes: int, *, repeats: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM  # the other processes need none of it

    from streamrl_workers.models.published import Parameters

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
    parser.add_argument("--link-megabytes", type=int, default=100, help="to peers; a link takes ten seconds for it")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    hashes(args.repeats)
    pulls(args.megabytes * 10**6, repeats=args.repeats)
    peers(args.link_megabytes * 2**20, generators=8, link_bytes_per_s=args.link_megabytes * 10**6 / 10)
    swaps(args.megabytes * 10**6, repeats=args.repeats)


if __name__ == "__main__":
    main()
