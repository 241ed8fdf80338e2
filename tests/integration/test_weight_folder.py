"""Weights through a real S3 server and through a directory: whole or not there, whenever the trainer is killed."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.object_store import ObjectFolder, StoreUnavailableError
from streamrl_workers.weights.address import WeightsError
from streamrl_workers.weights.disk_folder import DiskFolder
from streamrl_workers.weights.folder import FolderSource
from streamrl_workers.weights.hashing import bytes_hash
from streamrl_workers.weights.pull import Nearby, VersionGoneError
from streamrl_workers.weights.source import Piece, SourceBrokenError
from support.folder_weights import SIZES, STEPS, TIMEOUT_S, FolderTrainer, pulled, pulls, tensors
from support.jobs import simulated_job, tiny_job, write_prompts
from support.runs import LocalRun
from support.s3_server import Kill, S3Server, s3_server

TESTS = Path(__file__).parent.parent
URL = "s3://runs/jobs"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(params=["store", "disk"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "store":
        request.getfixturevalue("server")
        return URL
    (tmp_path / "shared").mkdir()
    return str(tmp_path / "shared")


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A name of its own for each test: clients of a place are kept."""
    return tmp_path.name


def there(trainer: FolderTrainer) -> set[str]:
    """Names of all that is in the folder."""
    return set(folder(trainer.server.address).sizes())


def folder(address: str) -> DiskFolder | ObjectFolder:
    return (DiskFolder if address.startswith("/") else ObjectFolder).at(address, field="url")


def needed(*versions: pb.VersionName) -> set[str]:
    """Names of what these versions have, and of the owner."""
    hashes = {bytes_hash(one.data) for v in versions for one in tensors(v.step).values() if one.data.nbytes}
    return (
        {"owner"}
        | {f"content/{one.hex()}" for one in hashes}
        | {f"versions/{v.attempt}-{v.step}-{v.hash.hex()}" for v in versions}
    )


def test_who_comes_at_once_and_who_comes_late_have_what_was_published(url: str, run: str) -> None:
    trainer = FolderTrainer(url, run=run, newest_kept=2)
    first = trainer.publish(1)

    async def two() -> list[list[int]]:
        return await asyncio.gather(*(pulled(trainer.server.address, first) for _ in range(2)))

    assert [sum(one) for one in asyncio.run(two())] == [sum(SIZES.values())] * 2
    newest = trainer.publish(2)
    assert pulls(trainer.server.address, newest) == sum(SIZES.values())
    assert there(trainer) == needed(first, newest)
    manifests = sum(size for name, size in folder(trainer.server.address).sizes().items() if name[0] == "v")
    assert trainer.server.served_bytes == sum(SIZES.values()) + SIZES["adapter"] + manifests, "the base is there once"


def test_older_versions_stay_as_long_as_a_pull_may_take_and_then_go(url: str, run: str) -> None:
    trainer = FolderTrainer(url, run=run)
    old, address = trainer.publish(1), trainer.server.address
    second = trainer.publish(2)
    trainer.now_s += TIMEOUT_S * 0.9
    third = trainer.publish(3)
    assert pulls(address, old)
    trainer.now_s += TIMEOUT_S * 0.2
    newest = trainer.publish(4)
    assert there(trainer) == needed(second, third, newest)
    with pytest.raises(VersionGoneError, match=r"version \(1, 1\) from .*: gone: versions/1-1-\w+ is not there"):
        pulls(address, old)


def test_a_directory_that_is_not_mounted_here_is_told_and_not_taken_for_a_version_that_is_gone(tmp_path: Path) -> None:
    away = FolderTrainer(str(tmp_path), run="run")
    version = away.publish(1)
    with pytest.raises(WeightsError, match=r"refused: spec.weights.folder.url: is not mounted here, got") as told:
        pulls(str(tmp_path / "elsewhere/run/weights"), version)
    assert not isinstance(told.value, VersionGoneError)


def test_no_more_old_versions_are_kept_than_a_bound(url: str, run: str) -> None:
    trainer = FolderTrainer(url, run=run)
    versions = [trainer.publish(step) for step in range(12)]
    assert there(trainer) == needed(*versions[-9:])


def test_the_next_life_uses_what_is_there_and_deletes_the_rest(url: str, run: str) -> None:
    before = FolderTrainer(url, run=run)
    before.publish(1)
    left = folder(before.server.address)
    for name in (f"content/{'0f' * 32}.partial", f"content/{'0f' * 32}", f"versions/0-9-{'0f' * 32}"):
        left.write(name, memoryview(b"of a life before"))
    left.write(f"content/{bytes_hash(tensors(2)['adapter'].data).hex()}", memoryview(b"too short"))
    trainer = FolderTrainer(url, run=run, attempt=2)
    version = trainer.publish(2)
    assert there(trainer) == needed(version)
    assert pulls(trainer.server.address, version)
    assert trainer.server.served_bytes < SIZES["base"]


def test_deltas_are_contents_like_others(url: str, run: str) -> None:
    trainer = FolderTrainer(url, run=run, deltas=True)
    nearby, saved = Nearby(), []
    nearby.delta_used = saved.append

    async def two() -> list[int]:
        await pulled(trainer.server.address, trainer.publish(1), nearby=nearby)
        return await pulled(trainer.server.address, trainer.publish(2), nearby=nearby)

    read = sum(asyncio.run(two()))
    assert 0 < read < SIZES["adapter"] / 10
    assert saved == [SIZES["adapter"] - read]


@pytest.mark.parametrize(
    ("kept", "told"), [(slice(1, None), "refused: .* ends at"), (slice(None), "adapter: corrupt: its bytes hash")]
)
def test_damaged_content_is_refused(url: str, run: str, kept: slice, told: str) -> None:
    trainer = FolderTrainer(url, run=run)
    version, data = trainer.publish(1), tensors(1)["adapter"].data
    damaged = b"x" + bytes(data[1:])
    folder(trainer.server.address).write(f"content/{bytes_hash(data).hex()}", memoryview(damaged[kept]))
    with pytest.raises(WeightsError, match=told):
        pulls(trainer.server.address, version)


@pytest.mark.soak
def test_a_trainer_that_is_killed_at_any_write_leaves_whole_versions(server: S3Server) -> None:
    n, code = 0, None
    while code != 0:
        n += 1
        server.reset()
        run = f"killed-{n}"
        command = [sys.executable, "-m", "support.folder_weights", URL, run]
        process = subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        server.arm(Kill(n, process.pid))
        told, _ = process.communicate("go\n", timeout=TIMEOUT_S)
        server.kill, code = None, process.returncode
        after = FolderTrainer(URL, run=run, attempt=2)
        found = {name.removeprefix("versions/") for name in there(after) if name.startswith("versions/")}
        assert set(told.split()[-1:]) <= found, f"write {n}: the newest version that was told of is there"
        for name in found:
            attempt, step, digest = name.split("-")
            version = pb.VersionName(attempt=int(attempt), step=int(step), hash=bytes.fromhex(digest))
            assert pulls(after.server.address, version) == sum(SIZES.values())
        version = after.publish(9)
        assert there(after) == needed(version), f"write {n}: nothing is left over"
    assert server.kills == n - 1 >= 3 * len(STEPS)


def test_a_store_that_is_away_is_asked_again_and_one_that_refuses_is_a_line(server: S3Server, run: str) -> None:
    trainer = FolderTrainer(URL, run=run)
    version = trainer.store.publish(attempt=1, step=1, tensors=tensors(1))

    def comes_back() -> bool:
        server.refusal = ""
        return False

    server.refusal = "SlowDown"
    assert trainer.server.offer(version, ended=comes_back)
    server.refusal = "SlowDown"
    version = trainer.store.publish(attempt=1, step=2, tensors=tensors(2))
    assert not trainer.server.offer(version, ended=lambda: True)

    def late() -> bool:
        trainer.now_s += TIMEOUT_S
        return False

    with pytest.raises(StoreUnavailableError, match=r"a version was not written within 240 s: "):
        trainer.server.offer(version, ended=late)
    server.refusal = "AccessDenied"
    with pytest.raises(UserError, match=r"spec.weights.folder.url: cannot write s3://runs/jobs"):
        FolderTrainer(URL, run=run).publish(3)


async def test_a_read_that_is_given_up_writes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = FolderTrainer(str(tmp_path), run="run")
    trainer.publish(1)
    content = tensors(1)["adapter"].data
    go, read = threading.Event(), DiskFolder.read

    def hang(*args: Any, **options: Any) -> bytes | None:
        go.wait()
        return read(*args, **options)

    monkeypatch.setattr(DiskFolder, "read", hang)
    memory = memoryview(bytearray(len(content)))
    piece = Piece(hash=bytes_hash(content), buffer=memory, begin=0, end=len(content))
    aborted, cancelled = (FolderSource(trainer.server.address) for _ in range(2))
    first = asyncio.create_task(aborted.fetch(piece, arrived=lambda _: None))
    second = asyncio.create_task(cancelled.fetch(piece, arrived=lambda _: None))
    await asyncio.sleep(0)
    aborted.abort()
    with pytest.raises(SourceBrokenError, match="given up"):
        await first
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go.set()
    while threads := [thread for thread in threading.enumerate() if thread.name.startswith("weights-folder")]:
        threads[0].join()
    assert not any(memory)
    assert piece.begin == 0


FOREIGN = ("content/00ff", "content/notes.txt", "contents/" + "0f" * 32, "versions/latest", "versions-old/1-1-00ff")


def test_what_has_no_name_of_ours_stays(url: str, run: str) -> None:
    before = FolderTrainer(url, run=run)
    before.publish(0)
    left = folder(before.server.address)
    for name in FOREIGN:
        left.write(name, memoryview(b"foreign"))
    before = FolderTrainer(url, run=run)
    version = before.publish(1)
    assert there(before) == needed(version) | {*FOREIGN}
    after = FolderTrainer(url, run=run, attempt=2)
    version = after.publish(2)
    assert there(after) == needed(version) | {*FOREIGN}


def test_a_second_run_of_one_name_is_refused_and_a_restart_is_not(url: str, run: str) -> None:
    first = FolderTrainer(url, run=run)
    version = first.publish(1)
    with pytest.raises(UserError) as told:
        FolderTrainer(url, run=run, owner=b"1" * 32).publish(1)
    address = first.server.address
    assert str(told.value) == (
        "spec.weights.folder.url: must not be that of another run with the same folder name, "
        f"got {url!r}; name another URL; if that run has ended, delete {address}"
    )
    assert there(first) == needed(version)
    assert pulls(address, FolderTrainer(url, run=run, attempt=2).publish(2))


def test_of_two_runs_that_begin_at_once_the_first_one_ends_at_its_next_version(url: str, run: str) -> None:
    first = FolderTrainer(url, run=run)
    first.publish(1)
    folder(first.server.address).write("owner", memoryview(b"1" * 32))
    with pytest.raises(UserError, match="another run with the same folder name"):
        first.publish(2)


@pytest.mark.parametrize("at", ["run", "run/weights", "run/weights/content", "run/weights/versions"])
def test_no_link_below_the_directory_is_followed(at: str, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    elsewhere = tmp_path / "elsewhere"
    away = FolderTrainer(str(tmp_path), run="elsewhere")
    version = away.publish(1)
    link = tmp_path / "shared" / at
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(elsewhere / Path(at).relative_to("run"))
    found = {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")}
    here = FolderTrainer(str(tmp_path / "shared"), run="run")
    with pytest.raises(UserError, match="there must be no symbolic link"):
        here.publish(2)
    assert {path: path.stat().st_mtime_ns for path in elsewhere.rglob("*")} == found
    if not at.endswith("content"):
        with pytest.raises(WeightsError, match="there must be no symbolic link"):
            pulls(here.server.address, version)


def test_a_link_at_a_name_of_ours_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    trainer = FolderTrainer(str(tmp_path), run="run")
    precious = tmp_path / "precious"
    precious.write_bytes(tensors(1)["adapter"].data)
    content = tmp_path / "run/weights/content"
    content.mkdir(parents=True)
    for name in (bytes_hash(tensors(1)["adapter"].data).hex(), "0f" * 32):
        (content / name).symlink_to(precious)
        (content / f"{name}.partial").symlink_to(precious)
    version = trainer.publish(1)
    trainer.publish(2)
    assert precious.read_bytes() == tensors(1)["adapter"].data
    assert pulls(trainer.server.address, version)


def test_a_run_through_a_directory_goes_to_its_end_though_its_trainer_is_killed(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "shared").mkdir()
    job = simulated_job(steps=12)
    job["spec"]["trainer"]["engine"]["simulated"]["weightBytes"] = 100_000
    job["spec"]["weights"] = {"folder": {"url": str(tmp_path / "shared"), "deltas": True}}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(5)
    run.kill("trainer-0")
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    names = [path.name for path in (tmp_path / "shared/run/weights/versions").iterdir()]
    assert names
    assert {name.split("-")[0] for name in names} == {"2"}


def test_a_second_run_into_the_folder_of_another_ends_with_a_line(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "shared").mkdir()
    job = simulated_job(steps=2)
    job["spec"]["weights"] = {"folder": {"url": str(tmp_path / "shared")}}
    folder(str(tmp_path / "shared")).write("run/weights/owner", memoryview(b"1" * 32))
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 2, run.logs()
    assert "must not be that of another run with the same folder name" in run.logs()
    assert "Traceback" not in run.logs()


def test_a_run_whose_directory_is_not_there_ends_with_a_line(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=2)
    job["spec"]["weights"] = {"folder": {"url": str(tmp_path / "missing")}}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 2, run.logs()
    assert f"spec.weights.folder.url: cannot write {tmp_path}/missing: FileNotFoundError" in run.logs()


def test_adapters_are_trained_through_a_store(server: S3Server, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = tiny_job(steps=3)
    job["spec"]["trainer"] = {"lora": {"rank": 2}}
    job["spec"]["weights"] = {"folder": {"url": URL}}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    sizes = folder(f"{URL}/run/weights").sizes()
    assert sum(name.startswith("versions/") for name in sizes) >= 2
