"""A new run goes on from the checkpoint of one that has ended: `streamrl run --from` here, `resumeFrom` in pods."""

import json
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


@pytest.fixture(scope="module")
def once_ended(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    """A run that has ended, of which each test has a copy."""
    base = tmp_path_factory.mktemp("ended")
    write_prompts(base / "prompts.jsonl")
    run = LocalRun.start(job(steps=OLD_STEPS), folder=base / "old", base_dir=base)
    assert run.wait_end() == 0, run.logs()
    return run


@pytest.fixture
def ended(once_ended: LocalRun, tmp_path: Path) -> LocalRun:
    """A run that has ended."""
    write_prompts(tmp_path / "prompts.jsonl")
    folder = shutil.copytree(once_ended.folder, tmp_path / "old", symlinks=True)
    return LocalRun(folder, once_ended.process)


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


def test_a_run_that_has_all_steps_is_refused_with_both_ways_on(ended: LocalRun, tmp_path: Path) -> None:
    arguments = ["--from", str(ended.folder)]
    run = LocalRun.start(job(steps=OLD_STEPS), folder=tmp_path / "new", base_dir=tmp_path, args=arguments)
    assert run.wait_end() == 2
    assert run.said().strip().splitlines()[-1] == (
        f"spec.pipeline.steps: must be above the {OLD_STEPS} steps of the run that it goes on from, which "
        f"count, got {OLD_STEPS}; give more steps; or take its weights alone and count from 0: "
        f"--weights-from {ended.folder}"
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.soak
def test_the_weights_alone_are_trained_for_all_steps(tmp_path: Path) -> None:
    """With an adapter: what is taken is base and adapter as one model."""
    old = LocalRun.start(small(tmp_path, "spec.trainer.lora={}"), folder=tmp_path / "old", base_dir=tmp_path)
    assert old.wait_end() == 0, old.logs()
    run = LocalRun.start(
        small(tmp_path, "spec.pipeline.steps=2", "spec.trainer.lora={}"),
        folder=tmp_path / "new",
        base_dir=tmp_path,
        args=["--weights-from", str(old.folder)],
    )
    assert run.wait_end() == 0, run.logs()
    assert "groups in 2 steps" in run.assert_exact()
    model = json.loads((run.folder / keys.FILE_JOB).read_text())["spec"]["model"]
    assert model == {"path": {"directory": str(old.folder / keys.DIR_EXPORT)}}
    replayed = streamrl("replay", str(run.folder))  # version 0 is that model
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "version 0 " in replayed.stdout


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ((), "--weights-from: must name a run that has ended: its trained model is written then"),
        (("--from", "x"), "--weights-from: must not be given with --from"),
    ],
)
def test_weights_of_a_run_without_a_trained_model_are_refused(
    tmp_path: Path, others: tuple[str, ...], line: str
) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "empty").mkdir()
    arguments = ["--weights-from", str(tmp_path / "empty"), *others]
    run = LocalRun.start(job(steps=STEPS), folder=tmp_path / "new", base_dir=tmp_path, args=arguments)
    assert run.wait_end() == 2
    assert line in run.said()
    assert not (tmp_path / "new").exists()


def test_a_run_that_has_ended_is_not_resumed_in_silence(ended: LocalRun) -> None:
    done = streamrl("run", "--resume", str(ended.folder))
    assert done.returncode == 0
    assert f"has ended already, with all of its steps; `streamrl report {ended.folder}` shows it" in done.stdout
    file = ended.folder / keys.FILE_JOB
    changed = json.loads(file.read_text())
    changed["spec"]["pipeline"]["steps"] = STEPS
    file.write_text(json.dumps(changed))
    refused = streamrl("run", "--resume", str(ended.folder))
    assert refused.returncode == 2
    assert f"has more steps than the {OLD_STEPS} with which the run has ended, got {STEPS}" in refused.stderr
    assert f"streamrl run FILE --from {ended.folder}" in refused.stderr


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


def test_a_job_whose_run_has_all_steps_fails_with_both_ways_on(ended: LocalRun, tmp_path: Path) -> None:
    """Exit code 2 of the scheduler fails the job on Kubernetes, with this line."""
    document = job(steps=OLD_STEPS, resumeFrom={"claimName": "kept"})
    document["metadata"]["namespace"] = "team"
    pods = Pods.make(document, base=tmp_path / "pods", secure=False)
    try:
        write_prompts(pods.run_dir / "prompts.jsonl")
        shutil.copytree(ended.folder / keys.DIR_CHECKPOINTS, pods.store.parent / "old-12345678" / keys.DIR_CHECKPOINTS)
        assert pods.start("scheduler").wait(PREPARED_S) == 2, pods.logs()
        assert f"must be above the {OLD_STEPS} steps of the run" in pods.last_line("scheduler")
        assert "storage.checkpoints.weightsFrom in place of resumeFrom" in pods.last_line("scheduler")
    finally:
        pods.close()


def test_a_checkpoint_that_lacks_a_file_is_refused_in_one_line(pods: Pods) -> None:
    """Exit code 2 fails the job on Kubernetes, with this line."""
    for file in pods.store.parent.glob(f"old-*/{keys.DIR_CHECKPOINTS}/*/simulated.json"):
        file.unlink()
    pods.start("scheduler")
    wait_for(pods.numbers, what=f"the scheduler; {pods.logs()}")
    trainer = pods.start("trainer")
    assert trainer.wait(60) == 2, pods.logs()
    assert "holds no good checkpoint (step-00000006: simulated.json is missing)" in pods.logs()


@pytest.mark.soak
def test_weights_that_do_not_fit_the_jobs_model_are_refused_in_one_line(tmp_path: Path) -> None:
    old = LocalRun.start(small(tmp_path), folder=tmp_path / "old", base_dir=tmp_path)
    assert old.wait_end() == 0, old.logs()
    checkpoints = {"claimName": "kept"}
    wider = small(tmp_path, "spec.model.scratch.intermediateSize=128", "spec.pipeline.steps=2", resumeFrom=checkpoints)
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
