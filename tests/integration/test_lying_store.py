"""An object store that lies: half of an object kept or given, old lists, wrong tags. What is restored is exact, or refused in a line."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_workers.stream import object_store
from streamrl_workers.stream.object_store import DamagedObjectError, ObjectFolder, StoreUnavailableError, local_file
from streamrl_workers.trainer.checkpoint import CheckpointStore
from streamrl_workers.trainer.engines.engine import RetryError
from support.copied_checkpoints import FIELD, copies, store, write
from support.folder_weights import SIZES, FolderTrainer, pulls
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun
from support.s3_lies import HalfRead, HalfWritten, NoNames, OldNames, OtherTags, Overwritten, Silent
from support.s3_server import S3Server, s3_server

DATA = "s3://runs/data/prompts.jsonl"
LINES = b"".join(b'{"prompt": "question %d"}\n' % number for number in range(100))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    with s3_server() as server:
        for name, value in {**server.environment, "HF_HOME": str(tmp_path / "cache")}.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def data(server: S3Server) -> ObjectFolder:
    folder = ObjectFolder.at("s3://runs/data", field=FIELD)
    folder.write("prompts.jsonl", memoryview(LINES))
    return folder


def newest_step(checkpoints: CheckpointStore) -> int | None:
    found = checkpoints.newest()
    return None if found is None else found.meta.step


@pytest.mark.parametrize("ends", ["step-00000004/model", "step-00000004/meta.json"])
def test_half_a_copy_that_the_store_says_it_has_is_no_copy(server: S3Server, tmp_path: Path, ends: str) -> None:
    checkpoints = store(tmp_path)
    write(checkpoints, 2)
    server.answers = HalfWritten(ends)
    with pytest.raises(RetryError, match=rf"cannot write s3://runs/\S+{ends}: the store has \d+ of \d+ bytes"):
        write(checkpoints, 4)
    server.answers = None
    assert newest_step(store(tmp_path)) == 4  # the successor of the process: from the disk, and copied again
    assert newest_step(store(tmp_path / "new")) == 4


@pytest.mark.parametrize("wrong_bytes", [False, True], ids=["half of it", "other bytes"])
def test_a_copy_that_comes_wrong_is_passed_over(*, server: S3Server, tmp_path: Path, wrong_bytes: bool) -> None:
    checkpoints = store(tmp_path)
    for step in (2, 4):
        write(checkpoints, step)
    server.answers = HalfRead("step-00000004/model", wrong_bytes=wrong_bytes)
    assert newest_step(store(tmp_path / "new")) == 2


def test_copies_of_which_none_is_good_are_no_new_run(server: S3Server, tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for step in (2, 4):
        write(checkpoints, step)
    server.answers = HalfRead("model")
    with pytest.raises(UserError, match=r"holds no good checkpoint \(copy step-00000004: cannot read \S+: 7 of 15"):
        store(tmp_path / "new").newest()


def test_a_list_of_objects_that_are_gone_is_passed_over(server: S3Server, tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for step in (2, 4):
        write(checkpoints, step)
    server.answers = OldNames()
    assert newest_step(store(tmp_path / "new")) == 4  # and the lists are remembered
    copy = copies().child("step-00000004")
    copy.files.rm_file(f"{copy.path}/ranks/0")
    assert newest_step(store(tmp_path / "newer")) == 2
    copy.files.rm_file(f"{copy.path}/meta.json")
    assert newest_step(store(tmp_path / "newest")) == 2


def test_tags_that_mean_nothing_do_not_matter_to_checkpoints(server: S3Server, tmp_path: Path) -> None:
    server.answers = OtherTags()
    write(store(tmp_path), 2)
    assert newest_step(store(tmp_path / "new")) == 2


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT"])
def test_a_store_that_never_answers_has_a_deadline(
    *, server: S3Server, data: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(object_store, "CALL_TIMEOUT_S", 1.0)
    server.answers = silent = Silent(method)
    try:
        with pytest.raises((StoreUnavailableError, RetryError), match=r"cannot \w+ s3://\S+: it has not answered in"):
            store(tmp_path).newest() if method == "PUT" else local_file(DATA, base_dir=tmp_path, field=FIELD)
    finally:
        silent.ended.set()


def test_half_a_data_set_is_none(server: S3Server, data: ObjectFolder, tmp_path: Path) -> None:
    server.answers = HalfRead("prompts.jsonl")
    with pytest.raises(DamagedObjectError, match=rf"cannot read {DATA}: \d+ of {len(LINES)} bytes came"):
        local_file(DATA, base_dir=tmp_path, field=FIELD)
    server.answers = None
    assert local_file(DATA, base_dir=tmp_path, field=FIELD).read_bytes() == LINES, "nothing of it is in the cache"


def test_what_is_overwritten_while_it_is_copied_is_not_taken(
    server: S3Server, data: ObjectFolder, tmp_path: Path
) -> None:
    other = LINES.replace(b"question", b"Question")
    server.answers = Overwritten("prompts.jsonl", lambda: data.write("prompts.jsonl", memoryview(other)))
    with pytest.raises(StoreUnavailableError, match="it was changed meanwhile"):
        local_file(DATA, base_dir=tmp_path, field=FIELD)
    assert local_file(DATA, base_dir=tmp_path, field=FIELD).read_bytes() == other


def test_weights_of_which_the_store_keeps_half_are_written_again(server: S3Server) -> None:
    trainer = FolderTrainer("s3://runs/jobs", run="half")
    server.answers = lies = HalfWritten("", once=True)
    version = trainer.publish(1)
    assert {name.rsplit("/", 2)[-2] for name in lies.names} >= {"weights", "content", "versions"}, lies.names
    assert pulls(trainer.server.address, version) == sum(SIZES.values())


def test_weights_that_only_an_old_list_has_are_written_again(server: S3Server) -> None:
    before = FolderTrainer("s3://runs/jobs", run="old")
    before.publish(1)
    folder = ObjectFolder.at(before.server.address, field=FIELD)
    server.answers = OldNames()
    names = folder.sizes()
    folder.delete(names)
    after = FolderTrainer("s3://runs/jobs", run="old", attempt=2)
    assert pulls(after.server.address, after.publish(1)) == sum(SIZES.values())


@pytest.mark.parametrize("server_says", [NoNames(), HalfRead("meta.json")], ids=["no names", "half of them"])
def test_a_run_whose_copies_cannot_be_found_is_refused_in_a_line(
    *, server: S3Server, tmp_path: Path, server_says: NoNames | HalfRead
) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=8, staleness=1)
    job["spec"]["storage"] = {"checkpoints": {"intervalSteps": 2, "keepLast": 1, "url": "s3://runs/jobs"}}
    hold = Hold.on(job, tmp_path, step=5)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(5)
    run.kill_all(["scheduler", "trainer-0", "generator-sim-0", "generator-sim-1"])
    for checkpoint in (tmp_path / "run" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    server.answers = server_says
    hold.let_go()
    run.resume()
    assert run.wait_end() == 2, run.logs()
    why = "put one back from a copy" if isinstance(server_says, NoNames) else "holds no good checkpoint (copy step-"
    assert why in run.said()
    run.assert_exact()
