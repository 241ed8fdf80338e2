"""A new run goes on from the checkpoint of one that has ended: `streamrl run --from` here, `resumeFrom` in pods."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl_cli.jobfile import load_job
from support.jobs import simulated_job, write_prompts
from support.pods import Pods
from support.runs import LocalRun, streamrl, wait_for

OLD_STEPS, STEPS = 6, 14
EXAMPLE = Path(__file__).parents[2] / "examples" / "chain-sum.yaml"
SMALL = (
    "spec.pipeline={batchGroups: 4, steps: 1}",
    "spec.model.scratch.warmUp.steps=1",
    "spec.task.evaluation=null",
    "spec.storage.checkpoints.intervalSteps=1",
)
PREPARED_S = 300.0


def job(*, steps: int, **checkpoints: Any) -> dict[str, Any]:
    document = simulated_job(steps=steps)
    document["spec"]["storage"] = {"checkpoints": {"intervalSteps": 2, **checkpoints}}
    return document


@pytest.fixture
def ended(tmp_path: Path) -> LocalRun:
    """A run that has ended."""
    write_prompts(tmp_path / "prompts.jsonl")
    run = LocalRun.start(job(steps=OLD_STEPS), folder=tmp_path / "old", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    return run


def test_a_local_run_goes_on_from_another_one(ended: LocalRun, tmp_path: Path) -> None:
    run = LocalRun.start(
        job(steps=STEPS), folder=tmp_path / "new", base_dir=tmp_path, args=["--from", str(ended.folder)]
    )
    run.wait_steps(OLD_STEPS + 3)
    run.kill("scheduler")
    run.kill("trainer-0")
    assert run.wait_end() == 0, run.logs()
    said = run.assert_exact()
    assert f"groups in {STEPS} steps, {OLD_STEPS} of them taken over from old" in said
    assert f"goes on from step {OLD_STEPS} of {ended.folder}" in run.said()
    assert run.result()["check"]["planned"] >= 4 * (STEPS - OLD_STEPS)
    ended.assert_exact()


def test_a_run_without_a_checkpoint_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "empty").mkdir()
    run = LocalRun.start(
        job(steps=STEPS), folder=tmp_path / "new", base_dir=tmp_path, args=["--from", str(tmp_path / "empty")]
    )
    assert run.wait_end() == 2
    assert "has no checkpoint; name a run that has written one" in run.said()
    assert not (tmp_path / "new").exists()


@pytest.fixture
def pods(ended: LocalRun, tmp_path: Path) -> Iterator[Pods]:
    """A new job whose volume holds the old run."""
    document = job(steps=STEPS, resumeFrom={"claimName": "kept"})
    document["metadata"]["namespace"] = "team"
    made = Pods.make(document, base=tmp_path / "pods", secure=False)
    write_prompts(made.run_dir / "prompts.jsonl")
    shutil.copytree(ended.folder / keys.DIR_CHECKPOINTS, made.store.parent / "old-12345678" / keys.DIR_CHECKPOINTS)
    yield made
    made.close()


def test_a_job_goes_on_from_what_lies_on_its_volume(pods: Pods) -> None:
    pods.start_all()
    wait_for(lambda: pods.numbers().get("result"), what=f"the end; {pods.logs()}")
    assert pods.numbers()["result"]["status"] == "succeeded"
    check = streamrl("journal", "check", str(pods.run_dir))
    assert check.returncode == 0, check.stdout
    assert f"{STEPS} steps, {OLD_STEPS} of them taken over from old-12345678" in check.stdout


def test_a_checkpoint_that_lacks_a_file_is_refused_in_one_line(pods: Pods) -> None:
    """Exit code 2 fails the job on Kubernetes, with this line."""
    for file in pods.store.parent.glob(f"old-*/{keys.DIR_CHECKPOINTS}/*/simulated.json"):
        file.unlink()
    pods.start("scheduler")
    wait_for(pods.numbers, what=f"the scheduler; {pods.logs()}")
    trainer = pods.start("trainer")
    assert trainer.wait(60) == 2, pods.logs()
    assert "holds no good checkpoint (step-00000006: simulated.json is missing)" in pods.logs()


def test_weights_that_do_not_fit_the_jobs_model_are_refused_in_one_line(tmp_path: Path) -> None:
    old = LocalRun.start(small(tmp_path), folder=tmp_path / "old", base_dir=tmp_path)
    assert old.wait_end() == 0, old.logs()
    checkpoints = {"claimName": "kept"}
    wider = small(tmp_path, "spec.model.scratch.intermediateSize=128", resumeFrom=checkpoints)
    pods = Pods.make(wider, base=tmp_path / "pods", secure=False)
    try:
        shutil.copytree(old.folder / keys.DIR_CHECKPOINTS, pods.store.parent / "old-12345678" / keys.DIR_CHECKPOINTS)
        shutil.copy(tmp_path / "chain_sum.py", pods.run_dir)
        places = {"job": pods.base / "job" / keys.FILE_JOB, "cache": pods.store / "models"}
        places["result"] = pods.base / "shared" / keys.FILE_MODEL
        prepare = pods.start("prepare", *(part for name, path in places.items() for part in (f"--{name}", str(path))))
        assert prepare.wait(PREPARED_S) == 0, pods.logs()
        pods.start("scheduler")
        assert pods.start("trainer").wait(PREPARED_S) == 2, pods.logs()
        misfit = "layers.0.mlp.gate_proj.weight has the shape [256, 96], here it is [128, 96]"
        assert f"step-00000001: does not fit this model: model.model.{misfit}" in pods.last_line("trainer")
    finally:
        pods.close()


def small(folder: Path, *overrides: str, **checkpoints: Any) -> dict[str, Any]:
    """A job with a real model, whose task lies in `folder`."""
    shutil.copy(EXAMPLE.with_name("chain_sum.py"), folder)
    document = load_job(EXAMPLE, overrides=[*SMALL, *overrides], local=False).model_dump(
        mode="json", by_alias=True, exclude_none=True
    )
    document["spec"]["storage"]["checkpoints"] |= checkpoints
    document["metadata"]["namespace"] = "team"
    return document
