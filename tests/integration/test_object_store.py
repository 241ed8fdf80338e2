"""Checkpoints, models and data in a real S3 server: whole or not there, whenever the writer is killed."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.keys import FILE_WEIGHTS_OWNER
from streamrl.spec.tasks.datasets import JsonlDataset
from streamrl_workers.stream.object_store import ObjectFolder, StoreUnavailableError, local_directory, local_file
from streamrl_workers.tasks.jsonl import open_jsonl
from streamrl_workers.trainer.checkpoint import discard_export
from streamrl_workers.trainer.engines.engine import RetryError
from support.copied_checkpoints import FIELD, STEPS, URL, copies, store, write
from support.held_runs import Hold
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, wait_for
from support.s3_server import Kill, S3Server, s3_server

TESTS = Path(__file__).parent.parent


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def test_each_checkpoint_is_copied_and_as_many_are_kept_as_on_the_disk(server: S3Server, tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    assert checkpoints.newest() is None
    for step in STEPS:
        write(checkpoints, step)
    assert copies().folders() == ["step-00000004", "step-00000006"]


def test_a_lost_disk_goes_on_from_the_newest_copy(server: S3Server, tmp_path: Path) -> None:
    for step in STEPS:
        write(store(tmp_path / "lost"), step)
    found = store(tmp_path / "new").newest()
    assert found is not None
    assert (found.meta.step, found.directory.parent) == (6, tmp_path / "new" / "checkpoints")
    assert (found.directory / "ranks/1").read_text() == "ranks/1 of step 6"


def test_a_damaged_copy_is_passed_over_and_a_damaged_disk_is_mended(server: S3Server, tmp_path: Path) -> None:
    checkpoints = store(tmp_path)
    for step in STEPS:
        write(checkpoints, step)
    (tmp_path / "checkpoints/step-00000006/model").write_text("flipped")
    found = checkpoints.newest()
    assert found is not None
    assert (found.directory / "model").read_text() == "model of step 6"
    copy = copies().child("step-00000006")
    copy.files.pipe_file(f"{copy.path}/model", b"flipped")
    found = store(tmp_path / "new").newest()
    assert found is not None
    assert found.meta.step == 4


def test_a_checkpoint_whose_writer_was_killed_before_the_copy_is_copied_at_the_next_start(
    server: S3Server, tmp_path: Path
) -> None:
    checkpoints = store(tmp_path)
    write(checkpoints, 2)
    copies().child("step-00000002").remove(commit="meta.json")
    assert copies().folders() == []
    assert checkpoints.newest() is not None
    assert copies().child("step-00000002").holds("meta.json")


def _writer(directory: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", "support.copied_checkpoints", str(directory)],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.soak
def test_a_writer_that_is_killed_at_any_write_leaves_what_it_told_of(server: S3Server, tmp_path: Path) -> None:
    n, code = 0, None
    while code != 0:
        n += 1
        server.reset()
        process = _writer(tmp_path / f"disk-{n}")
        server.arm(Kill(n, process.pid))
        told, _ = process.communicate("go\n", timeout=120)
        server.kill, code = None, process.returncode
        newest = max([int(line) for line in told.split()], default=0)
        found = store(tmp_path / f"new-{n}").newest()  # on another disk: what the store has is all there is
        step = 0 if found is None else found.meta.step
        assert step in (newest, newest + 2), f"write {n}: told of {newest}, found {step}"
    assert server.kills == n - 1 >= 4 * len(STEPS)


def test_a_run_whose_disk_lost_its_checkpoints_goes_on_from_the_copies(server: S3Server, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    data = ObjectFolder.at("s3://runs/data", field=FIELD)
    data.files.put_file(str(tmp_path / "prompts.jsonl"), f"{data.path}/prompts.jsonl")
    job = simulated_job(steps=8, staleness=1)
    job["spec"]["task"]["dataset"]["jsonl"]["path"] = "s3://runs/data/prompts.jsonl"
    job["spec"]["storage"] = {"checkpoints": {"intervalSteps": 2, "keepLast": 1, "url": URL}}
    job["spec"]["weights"] = {"folder": {"url": "s3://runs/weights"}}
    hold = Hold.on(job, tmp_path, step=5)
    (tmp_path / "prompts.jsonl").unlink()
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(5)
    copies = ObjectFolder.at(URL, field=FIELD).child("run").child("checkpoints")
    wait_for(lambda: "step-00000004" in copies.folders(), what="the copy, which is made beside the steps")
    run.kill_all(["scheduler", "trainer-0", "generator-sim-0", "generator-sim-1"])
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / FILE_WEIGHTS_OWNER).unlink()
    hold.let_go()
    run.resume()
    assert run.wait_end() == 0, run.logs()
    trainer = (run.folder / "logs" / "trainer-0.log").read_text()
    assert f"fetched {URL}/run/checkpoints/step-00000004" in trainer
    run.assert_exact()
    copied = ObjectFolder.at(URL, field=FIELD).child("run")
    assert copied.folders() == ["checkpoints", "model"]
    assert copied.child("checkpoints").folders() == ["step-00000008"]


def test_copies_of_an_earlier_run_in_a_folder_of_this_name_are_told(server: S3Server, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    job = simulated_job(steps=2)
    job["spec"]["storage"] = {"checkpoints": {"intervalSteps": 2, "url": URL}}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    shutil.rmtree(tmp_path / "run")
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 2, run.logs()
    assert f"the copies in {URL} may be of an earlier run" in run.logs()


def test_a_place_that_cannot_be_used_is_a_line(server: S3Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"spec.storage.checkpoints.url: cannot write s3://nowhere/x/run"):
        store(tmp_path, url="s3://nowhere/x").newest()
    with pytest.raises(UserError, match="Protocol not known: gopher"):
        copies("gopher://bucket/x")
    with pytest.raises(UserError, match="must be an object store, not a disk"):
        copies("file:///tmp/x")


@pytest.mark.parametrize(
    ("code", "kind"),
    [("AccessDenied", UserError), ("ExpiredToken", StoreUnavailableError), ("SlowDown", StoreUnavailableError)],
)
def test_what_passes_is_asked_again_and_what_does_not_is_a_line(
    server: S3Server, code: str, kind: type[Exception]
) -> None:
    server.refusal = code
    with pytest.raises(kind, match=f"cannot write {URL}/run"):
        copies().probe()


def test_data_in_a_store_that_is_away_is_no_mistake_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        environment = server.environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnavailableError, match="cannot read s3://runs/data"):
        open_jsonl(JsonlDataset(path="s3://runs/data/prompts.jsonl"), seed=0, base_dir=tmp_path)


def test_a_store_that_is_away_ends_the_process_for_another_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        environment = server.environment
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RetryError, match=f"checkpoints: cannot write {URL}/run"):
        store(tmp_path).newest()


def test_models_and_data_are_copied_once_for_what_the_store_holds(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    url, models, patterns = "s3://runs/data", tmp_path / "models", ("*.json", "*.safetensors", "*.txt")
    folder = ObjectFolder.at(url, field=FIELD)
    for name in ("config.json", "model.safetensors", "training.bin", "tokenizer/vocab.txt"):
        folder.files.pipe_file(f"{folder.path}/{name}", name.encode())
    first = local_directory(url, cache_dir=models, field=FIELD, patterns=patterns)
    names = sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file())
    assert names == ["config.json", "model.safetensors", "tokenizer/vocab.txt"]
    assert local_directory(f"{url}/", cache_dir=models, field=FIELD, patterns=patterns) == first
    file = local_file(f"{url}/config.json", base_dir=tmp_path, field=FIELD)
    assert file.read_text() == "config.json"
    folder.files.pipe_file(f"{folder.path}/config.json", b"another")
    assert local_file(f"{url}/config.json", base_dir=tmp_path, field=FIELD).read_text() == "another"
    with pytest.raises(UserError, match=r"cannot read s3://runs/data: FileNotFoundError: .*missing\.json"):
        local_file(f"{url}/missing.json", base_dir=tmp_path, field=FIELD)
    with pytest.raises(UserError, match="holds nothing that could be read"):
        local_directory(f"{url}/missing", cache_dir=models, field=FIELD, patterns=patterns)


def test_one_file_of_a_large_bucket_is_copied_by_its_own_name_alone(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    files = ObjectFolder.at("s3://runs", field=FIELD).files
    for name in ("rows[1].jsonl", "rows1.jsonl", "runs/other.jsonl"):
        files.pipe_file(f"runs/{name}", name.encode())
    server.lists = 0
    assert local_file("s3://runs/rows[1].jsonl", base_dir=tmp_path, field=FIELD).read_text() == "rows[1].jsonl"
    assert server.lists == 0


def test_a_disk_that_is_full_is_no_fault_of_the_store(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = copies()
    copy.files.pipe_file(f"{copy.path}/model", b"weights")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/model").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as full:
        copy.download(tmp_path / "full")
    write(store(tmp_path / "lost"), 2)

    def download(*_: object) -> None:
        raise full.value

    monkeypatch.setattr(ObjectFolder, "download", download)
    with pytest.raises(UserError, match="a checkpoint cannot be written: No space left on device; free the disk"):
        store(tmp_path / "new").newest()
    monkeypatch.setenv("HF_HOME", "/dev/full")
    with pytest.raises(UserError, match=r"spec.task.dataset.jsonl.path: cannot be copied: .*/dev/full"):
        open_jsonl(JsonlDataset(path=f"{copy.url}/model"), seed=0, base_dir=tmp_path)


def test_the_copy_of_a_model_goes_though_the_disk_has_lost_it(server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    copies().child("model").upload(tmp_path / "model", commit="config.json")
    shutil.rmtree(tmp_path / "model")
    for _ in range(2):  # where there is none it is as good
        discard_export(tmp_path / "model", copies=copies())
        assert copies().folders() == []
