"""A trainer that cannot run, for each of the usual reasons, is mended while the job is suspended: steps go on from the checkpoint."""

import sqlite3
from contextlib import closing
from typing import Any

import pytest

from cluster.operators import Operator
from e2e.jobs import simulated, small_pod
from e2e.stage import Stage
from streamrl import keys, names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = "mended"
CHECKPOINT_STEPS = 5
TROUBLE_S = 240.0
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "image": ({"image": "registry.invalid/trainre:1", "imagePullPolicy": "IfNotPresent"}, "ImagePullBackOff"),
    "memory": ({"resources": {"requests": {"memory": "12Mi"}, "limits": {"memory": "12Mi"}}}, "OOMKilled"),
}
"""What is wrong with the trainer's pod, and what Ready says then."""


def told(stage: Stage) -> str:
    """Reason and message of Ready."""
    ready = stage.condition(JOB, "Ready")
    return f"{ready.get('reason')} {ready.get('message')}"


def pause_and_change(stage: Stage, **spec: Any) -> None:
    """Suspended and changed in one write; resumed when no pod is left."""
    stage.change(JOB, suspend=True, **spec)
    stage.wait_for(
        lambda: stage.condition(JOB, "Suspended").get("status") == "True", "no pods", job=JOB, deadline_s=TROUBLE_S
    )
    stage.change(JOB, suspend=False)


def attempts(stage: Stage) -> list[int]:
    """The step that each life of the trainer began at."""
    with closing(sqlite3.connect(f"file:{stage.run_dir(JOB) / keys.FILE_JOURNAL}?mode=ro", uri=True)) as journal:
        return [step for (step,) in journal.execute("SELECT step FROM attempts ORDER BY attempt")]


def test_a_trainer_that_cannot_run_is_mended(watched: tuple[Stage, Operator]) -> None:
    stage, _ = watched
    job = simulated(JOB, steps=10_000, step_s=0.2, replicas=2)
    job["spec"]["failurePolicy"] = {"maxRestarts": 100}
    job["spec"]["trainer"]["pod"] = small_pod(nodeSelector={"gpu": "h1000"})
    stage.apply(job)
    stage.wait_for(lambda: "Unschedulable" in told(stage), "the wrong selector to be told of", job=JOB)
    pause_and_change(stage, trainer={"pod": {"nodeSelector": None}})
    stage.wait_step(JOB, CHECKPOINT_STEPS + 1)
    volumes = {each["metadata"]["uid"] for each in stage.list("persistentvolumeclaims")}
    right = stage.must("rljobs", JOB)["spec"]["trainer"]["pod"]
    for wrong, reason in WRONG.values():
        pause_and_change(stage, trainer={"pod": wrong})
        stage.wait_for(lambda: reason in told(stage), f"{reason} to be told of", job=JOB, deadline_s=TROUBLE_S)  # noqa: B023 - called at once
        before = stage.steps(JOB)
        back = {name: right.get(name) for name in wrong}
        if "resources" in back:
            back["resources"] = {**right["resources"], "limits": None}  # a merge leaves what it does not name
        pause_and_change(stage, trainer={"pod": back})
        stage.wait_step(JOB, before + CHECKPOINT_STEPS + 1)
    last = stage.page(JOB)["step"] + CHECKPOINT_STEPS
    pause_and_change(stage, pipeline={"steps": last})
    status = stage.wait_succeeded(JOB)
    stage.assert_exact(JOB)
    begun = attempts(stage)
    assert status["step"] >= last
    assert begun == sorted(begun)
    assert begun[1] >= CHECKPOINT_STEPS, "steps go on from the checkpoint"
    assert {each["metadata"]["uid"] for each in stage.list("persistentvolumeclaims")} == volumes
    assert names.trainer(JOB) in {each["metadata"]["name"] for each in stage.list("statefulsets")}
