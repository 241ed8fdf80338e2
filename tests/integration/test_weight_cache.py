"""The weight cache: generators that share a directory, files that are damaged, disks that refuse, writers that die."""

import asyncio
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.weights import cache as cache_module
from streamrl_workers.weights import pull as pull_module
from streamrl_workers.weights.cache import WeightCache
from streamrl_workers.weights.hashing import describe, tensors_hash
from streamrl_workers.weights.pull import Nearby
from support.gates import REWARD, Gate
from support.jobs import simulated_job, write_prompts
from support.metric_pages import families, series
from support.runs import DEADLINE_S, wait_for
from support.weight_servers import SIZES, make_tensors, pull_from, weight_server
from support.worker_processes import Workers

TOTAL = sum(SIZES.values())
WEIGHT_BYTES = 300_000


class Generator:
    """One that pulls; what came from where."""

    def __init__(self, directory: Path, *, most_bytes: int = 10 * TOTAL) -> None:
        self.fetched = self.cached = 0
        self.cache = WeightCache(directory, most_bytes=most_bytes, name="a", was_read=self._was_read)
        self.nearby = Nearby(cache=self.cache)

    def _was_read(self, size: int) -> None:
        self.cached += size

    def _arrived(self, size: int) -> None:
        self.fetched += size

    async def pulled(self, address: str) -> tuple[int, int]:
        """Pull it all, as a generator that holds nothing; (bytes fetched, bytes from the cache)."""
        self.nearby.held.clear()
        return await self.pulled_again(address)

    async def pulled_again(self, address: str) -> tuple[int, int]:
        """Pull what is not held of the version before."""
        self.fetched = self.cached = 0
        version = pb.VersionName(attempt=1, step=5, hash=tensors_hash(make_tensors()))
        tensors = await pull_from(
            pb.WeightsAvailable(version=version, address=address),
            timeout_s=DEADLINE_S,
            arrived=self._arrived,
            nearby=self.nearby,
        )
        assert tensors == make_tensors()
        return self.fetched, self.cached


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with weight_server() as (at, _, _):
        yield at


def files(directory: Path) -> dict[str, Path]:
    """Name of a tensor -> its file, of those that are there."""
    found = {entry.name: directory / "blake3" / entry.slices[0].hash.hex() for entry in describe(make_tensors())}
    return {name: path for name, path in found.items() if path.exists()}


async def until_written(directory: Path, names: AbstractSet[str] = SIZES.keys()) -> None:
    await asyncio.to_thread(wait_for, lambda: set(files(directory)) >= names, what=f"files of {names}")


def told(directory: Path, number: int, *, what: str) -> str:
    return f"weight cache {directory}: cannot be {what}: {os.strerror(number)}. Weights come from the trainer instead"


async def warm(directory: Path, address: str) -> None:
    first = Generator(directory)
    with closing(first.cache):
        assert await first.pulled(address) == (TOTAL, 0)
        await until_written(directory)


async def test_a_new_generator_pulls_nothing_from_the_trainer(tmp_path: Path, address: str) -> None:
    await warm(tmp_path, address)
    second = Generator(tmp_path)
    with closing(second.cache):
        assert await second.pulled(address) == (0, TOTAL)


async def test_a_flipped_bit_is_noticed_and_pulled_again(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    await warm(tmp_path, address)
    damaged = bytearray(files(tmp_path)["big"].read_bytes())
    damaged[12345] ^= 4
    files(tmp_path)["big"].write_bytes(damaged)
    files(tmp_path)["odd"].write_bytes(b"short")
    second = Generator(tmp_path)
    with closing(second.cache):
        assert await second.pulled(address) == (SIZES["big"] + SIZES["odd"], SIZES["small"])
        assert [record.message for record in caplog.records if "not what was written" in record.message] == [
            f"weight cache {tmp_path}: has a file that is not what was written; such files are removed and written anew. "
            "Weights come from the trainer instead"
        ]
        await until_written(tmp_path)
        assert await second.pulled(address) == (0, TOTAL)


async def test_a_full_disk_is_one_line(tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture) -> None:
    """A limit on file sizes stands for it: the largest tensor is cut off while it is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    generator = Generator(tmp_path)
    with closing(generator.cache):
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZES["big"] // 2, hard))
        try:
            assert await generator.pulled(address) == (TOTAL, 0)
            await asyncio.to_thread(wait_for, lambda: caplog.records, what="a warning")
            await until_written(tmp_path, SIZES.keys() - {"big"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [record.message for record in caplog.records] == [told(tmp_path, errno.EFBIG, what="written")]
    assert len(list((tmp_path / "blake3").iterdir())) == len(SIZES) - 1


async def test_a_read_only_cache_is_read(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(tmp_path, address)
    files(tmp_path)["odd"].unlink()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(cache_module.os, "utime", refuse)  # what changes a file of a volume that is mounted so
    generator = Generator(tmp_path)
    with closing(generator.cache):
        assert await generator.pulled(address) == (SIZES["odd"], TOTAL - SIZES["odd"])
        await asyncio.to_thread(wait_for, lambda: caplog.records, what="a warning")
        assert await generator.pulled(address) == (SIZES["odd"], TOTAL - SIZES["odd"])
    assert [record.message for record in caplog.records] == [told(tmp_path, errno.EROFS, what="prepared")]


async def test_a_place_that_is_no_directory_is_one_line(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    generator = Generator(tmp_path / "file")
    with closing(generator.cache):
        assert await generator.pulled(address) == (TOTAL, 0)
    assert caplog.records
    assert {record.levelname for record in caplog.records} == {"WARNING"}


async def test_a_link_is_not_followed(tmp_path: Path, address: str) -> None:
    await warm(tmp_path / "cache", address)
    path = files(tmp_path / "cache")["big"]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    second = Generator(tmp_path / "cache")
    with closing(second.cache):
        assert await second.pulled(address) == (SIZES["big"], TOTAL - SIZES["big"])


async def test_what_lies_behind_a_link_is_not_touched(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("0f" * 32, ".partial-deadbeef"):
        (elsewhere / name).write_bytes(b"x" * TOTAL)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "blake3").symlink_to(elsewhere)
    generator = Generator(tmp_path / "cache", most_bytes=TOTAL)
    with closing(generator.cache):
        assert await generator.pulled(address) == (TOTAL, 0)
        await asyncio.to_thread(wait_for, lambda: "prepared" in caplog.text, what="a warning")
    assert sorted(path.name for path in elsewhere.iterdir()) == [".partial-deadbeef", "0f" * 32]


async def test_only_names_of_ours_are_removed(tmp_path: Path, address: str) -> None:
    (tmp_path / "blake3").mkdir()
    foreign = [tmp_path / "blake3" / name for name in (".partial-", ".partial-results", "0f" * 31, "notes")]
    for path in foreign:
        path.write_bytes(b"x" * TOTAL)
    await warm(tmp_path, address)
    assert all(path.exists() for path in foreign)


async def test_a_disk_that_does_not_answer_is_left_alone(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(tmp_path, address)
    healed = threading.Event()
    opened = cache_module.open_regular

    def hang(path: Path, *, beneath: Path) -> Any:
        healed.wait(DEADLINE_S)
        return opened(path, beneath=beneath)

    monkeypatch.setattr(cache_module, "open_regular", hang)
    monkeypatch.setattr(pull_module, "_CACHE_SHARE", 1e-4)
    generator = Generator(tmp_path)
    with closing(generator.cache):
        try:
            assert await generator.pulled(address) == (TOTAL, 0)
            stuck = reading_threads()
            assert stuck
            assert await generator.pulled(address) == (TOTAL, 0)
            assert reading_threads() == stuck
        finally:
            healed.set()
        monkeypatch.setattr(pull_module, "_CACHE_SHARE", 1.0)
        await asyncio.to_thread(wait_for, lambda: not reading_threads(), what="the end of its reads")
        assert await generator.pulled(address) == (0, TOTAL)
    assert [record.message for record in caplog.records] == [
        f"weight cache {tmp_path}: has not answered yet; it is not asked until it has. "
        "Weights come from the trainer instead"
    ]


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weight-cache-read"]


async def test_a_read_that_the_end_of_its_pull_cut_off_is_not_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healed, asked = threading.Event(), threading.Semaphore(0)

    def hang(*_: Path, **__: Path) -> None:
        asked.release()
        healed.wait(DEADLINE_S)

    monkeypatch.setattr(cache_module, "open_regular", hang)
    entries = [entry.slices[0] for entry in describe(make_tensors())]
    with closing(Generator(tmp_path).cache) as cache:
        try:
            cache.begin(entries, wait_s=DEADLINE_S)
            read = asyncio.create_task(cache.read(entries[0]))
            await asyncio.to_thread(asked.acquire, timeout=DEADLINE_S)
            read.cancel()
            await asyncio.wait([read])
            cache.begin(entries, wait_s=DEADLINE_S)
            assert [await cache.read(entry) for entry in entries] == [None] * len(entries)
            assert not asked.acquire(blocking=False)
        finally:
            healed.set()


async def test_a_slow_disk_has_one_time_for_each_pull(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await warm(tmp_path, address)
    now_s = 1000.0
    opened = cache_module.open_regular

    def crawl(path: Path, *, beneath: Path) -> Any:
        nonlocal now_s
        now_s += 15
        return opened(path, beneath=beneath)

    monkeypatch.setattr(cache_module, "open_regular", crawl)
    entries = [entry.slices[0] for entry in describe(make_tensors())]
    slow = WeightCache(tmp_path, most_bytes=2 * TOTAL, name="a", was_read=lambda _: None, clock=lambda: now_s)
    with closing(slow):
        for _ in range(2):
            slow.begin(entries, wait_s=30)
            read = [await slow.read(entry) for entry in entries]
            assert [data is not None for data in read] == [True, True, False, False]
            now_s += 1000  # while nothing is read


async def test_a_disk_that_does_not_write_keeps_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    healed, asked = threading.Event(), threading.Event()
    made = cache_module.replace_at

    def hang(*args: Any, **options: Any) -> None:
        asked.set()
        healed.wait(DEADLINE_S)
        made(*args, **options)

    monkeypatch.setattr(cache_module, "replace_at", hang)
    tensors = make_tensors()
    entries = {entry.name: entry.slices[0] for entry in describe(tensors)}

    def write(name: str) -> "weakref.ref[memoryview]":
        data = memoryview(bytes(tensors[name].data))
        cache.write(entries[name], data)
        return weakref.ref(data)

    with closing(Generator(tmp_path).cache) as cache:
        try:
            cache.begin(entries.values(), wait_s=DEADLINE_S)
            stuck = write("big")
            await asyncio.to_thread(asked.wait, DEADLINE_S)
            waiting = write("odd")
            assert waiting() is not None
            cache.begin(entries.values(), wait_s=DEADLINE_S)
            assert waiting() is None
            assert write("odd")() is None
            assert stuck() is not None
        finally:
            healed.set()
        await until_written(tmp_path, {"big"})
        await asyncio.to_thread(wait_for, lambda: stuck() is None, what="the end of the write")
        cache.begin(entries.values(), wait_s=DEADLINE_S)
        await asyncio.to_thread(wait_for, lambda: write("odd") and files(tmp_path).keys() >= {"odd"}, what="a write")


_HANGS = """
import asyncio, sys, threading
from pathlib import Path
from streamrl_workers.weights import cache
from streamrl_workers.weights.hashing import describe
from support.weight_servers import make_tensors

asked = threading.Semaphore(0)
def hang(*_, **__):
    asked.release()
    threading.Event().wait()

async def work():
    cache.open_regular = cache.replace_at = hang
    tensors = make_tensors()
    entries = [entry.slices[0] for entry in describe(tensors)]
    one = cache.WeightCache(Path(sys.argv[1]), most_bytes=10**9, name="a", was_read=print)
    one.begin(entries, wait_s=1000)
    one.write(entries[0], tensors[min(tensors)].data)
    reading = asyncio.create_task(one.read(entries[0]))
    await asyncio.sleep(0)
    asked.acquire(), asked.acquire()
    reading.cancel()
    one.close()

asyncio.run(work())
sys.exit(75)
"""


async def test_a_process_ends_while_its_disk_hangs(tmp_path: Path) -> None:
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", _HANGS, str(tmp_path)], cwd=Path(__file__).parents[1], timeout=DEADLINE_S
    )
    assert ended.returncode == 75


_DIES = """
import os, signal, sys
from pathlib import Path
from streamrl_workers.weights import cache
from streamrl_workers.weights.hashing import describe
from support.weight_servers import make_tensors

class Dying:
    def __init__(self, file): self.file = file
    def __enter__(self): return self
    def __exit__(self, *_): self.file.close()
    def write(self, data):
        self.file.write(data[: len(data) // 2])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

opened = os.fdopen
cache.os.fdopen = lambda handle, mode: Dying(opened(handle, mode))
tensors = make_tensors()
entries = [entry.slices[0] for entry in describe(tensors) if entry.name == "big"]
one = cache.WeightCache(Path(sys.argv[1]), most_bytes=10**9, name="a", was_read=print)
one.begin(entries, wait_s=1)
one.write(entries[0], tensors["big"].data)
signal.pause()
"""


async def test_a_killed_writer_leaves_nothing_half(tmp_path: Path, address: str) -> None:
    died = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", _DIES, str(tmp_path)], cwd=Path(__file__).parents[1], timeout=DEADLINE_S
    )
    assert died.returncode == -signal.SIGKILL
    assert not files(tmp_path)
    (left,) = (tmp_path / "blake3").iterdir()
    assert left.stat().st_size == SIZES["big"] // 2
    os.utime(left, (0, 0))  # it was long ago
    await warm(tmp_path, address)
    assert left.exists()  # there was no newer file to tell its age by
    second = Generator(tmp_path)
    with closing(second.cache):
        assert await second.pulled(address) == (0, TOTAL)
        await asyncio.to_thread(wait_for, lambda: not left.exists(), what="the removal of what was left")


async def test_the_oldest_go_first_and_never_what_is_pulled(tmp_path: Path, address: str) -> None:
    (tmp_path / "blake3").mkdir()
    (tmp_path / "mine.txt").write_text("of somebody")
    (tmp_path / "blake3" / "mine.txt").write_text("of somebody")
    old = [tmp_path / "blake3" / (str(number) * 64) for number in range(4)]
    for age, path in enumerate(old):
        path.write_bytes(bytes(TOTAL // 2))
        os.utime(path, (1000 + age, 1000 + age))
    generator = Generator(tmp_path, most_bytes=2 * TOTAL)
    with closing(generator.cache):
        await generator.pulled(address)
        await until_written(tmp_path)
    assert [path.exists() for path in old] == [False, False, True, True]
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "blake3" / "mine.txt").exists()


async def test_what_a_generator_holds_is_in_use(tmp_path: Path, address: str) -> None:
    """The base of adapters is pulled once, and for as long as somebody trains on it a new generator finds it."""
    generator = Generator(tmp_path, most_bytes=2 * TOTAL)
    with closing(generator.cache):
        await generator.pulled(address)
        await until_written(tmp_path)
        for path in files(tmp_path).values():
            os.utime(path, (1000, 1000))
        newer = tmp_path / "blake3" / ("1" * 64)
        newer.write_bytes(bytes(2 * TOTAL))
        assert await generator.pulled_again(address) == (0, 0)
        await asyncio.to_thread(wait_for, lambda: not newer.exists(), what="the removal of a file that nobody uses")
        assert files(tmp_path).keys() == SIZES.keys()


async def test_without_room_for_a_version_nothing_is_written(
    tmp_path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    generator = Generator(tmp_path, most_bytes=TOTAL - 1)
    with closing(generator.cache):
        await generator.pulled(address)
        await asyncio.to_thread(wait_for, lambda: caplog.records, what="a warning")
    assert re.search(f"may hold {TOTAL - 1} bytes, and one version has {TOTAL}", caplog.text)
    assert not files(tmp_path)


def by_source(workers: Workers, process: str) -> dict[str, float]:
    page = families(workers.page("metrics", process=process).encode())
    return {one.labels["source"]: one.value for one in page["streamrl_weights_pulled_bytes_total"].samples}


def served(workers: Workers) -> float:
    return series(workers.page("metrics", process="trainer-0").encode(), "streamrl_weights_served_bytes_total")


def test_a_run_goes_on_without_its_cache(tmp_path: Path) -> None:
    """The kernel's own file system takes no directory of anybody's."""
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=4)
    job["spec"]["generators"][0]["weightCache"] = {"path": "/proc/streamrl-cache", "maxBytes": "1Mi"}
    workers = Workers.prepare(job, folder=tmp_path / "run")
    try:
        workers.start_all()
        for process in ("scheduler", "trainer-0", "generator-sim-0"):
            assert workers.wait(process) == 0, workers.text(process)
        assert workers.text("generator-sim-0").count("weight cache") == 1
    finally:
        workers.close()


def test_a_generator_that_comes_later_takes_no_byte_from_the_trainer(tmp_path: Path) -> None:
    """Real processes. The gate stays shut: there is one version."""
    Gate.shut(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job()
    job["spec"]["task"]["rewards"] = [REWARD]
    job["spec"]["trainer"]["engine"]["simulated"]["weightBytes"] = WEIGHT_BYTES
    job["spec"]["generators"][0]["weightCache"] = {"path": str(tmp_path / "cache"), "maxBytes": "1Mi"}
    workers = Workers.prepare(job, folder=tmp_path / "run")
    try:
        workers.start_all()
        wait_for(lambda: list((tmp_path / "cache").glob("blake3/????*")), what="the weights in the cache")
        wait_for(
            lambda: served(workers) == WEIGHT_BYTES, what="the count of what was sent"
        )  # a chunk counts once it is gone
        assert by_source(workers, "generator-sim-0") == {"trainer": WEIGHT_BYTES, "peer": 0, "cache": 0}
        workers.start("generator-sim-1")
        workers.endpoint("generator-sim-1")
        wait_for(lambda: by_source(workers, "generator-sim-1")["cache"], what="weights from the cache")
        wait_for(
            lambda: workers.page("healthz", process="generator-sim-1").strip() == "ok", what="weights in the engine"
        )
        assert by_source(workers, "generator-sim-1") == {"trainer": 0, "peer": 0, "cache": WEIGHT_BYTES}
        assert served(workers) == WEIGHT_BYTES
    finally:
        workers.close()
