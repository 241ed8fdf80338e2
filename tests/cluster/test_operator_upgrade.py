"""Another release of the operator takes over: what runs is left as it is, what begins is of the new release."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator
from streamrl import keys
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

OLD, NEW = ("trainer:test", "generator:test"), ("trainer:next", "generator:next")
SETS = ("trainer", "sim")


@pytest.fixture
def upgraded(own_control_plane: ControlPlane, namespace: str) -> Iterator[Operator]:
    """The same operator of the next release; not started yet."""
    images = dict(zip((keys.ENV_TRAINER_IMAGE, keys.ENV_GENERATOR_IMAGE), NEW, strict=True))
    made = Operator(own_control_plane, namespace, name="upgraded", **images)
    yield made
    if made.runs:
        assert made.stop() == 0, made.tail()


def create(lab: Lab, name: str, **spec: Any) -> None:
    """A small job."""
    document = simulated_job()
    document["metadata"]["name"] = name
    document["spec"] |= spec
    lab.create("rljobs", document)


def images(lab: Lab, job: str) -> tuple[str, ...]:
    """Of trainer and generators, as their StatefulSets have them; empty where there is none."""
    found = [lab.get("statefulsets", f"{job}-{name}") for name in SETS]
    return tuple(one["spec"]["template"]["spec"]["containers"][0]["image"] if one else "" for one in found)


def generations(lab: Lab, job: str) -> list[int]:
    return [lab.must("statefulsets", f"{job}-{name}")["metadata"]["generation"] for name in SETS]


def wait_for_images(lab: Lab, operator: Operator, job: str, want: tuple[str, str]) -> None:
    trainer, generator = want
    told = {"trainer": trainer, "generator": generator, "tasks": trainer}
    lab.wait(
        lambda: images(lab, job) == want and lab.must("rljobs", job).get("status", {}).get("images") == told,
        f"{job} with {want}",
        operator,
    )


def suspend(lab: Lab, operator: Operator, job: str) -> None:
    lab.patch("rljobs", job, {"spec": {"suspend": True}})
    lab.wait(lambda: lab.condition(job, "Suspended").get("status") == "True", f"{job} to be suspended", operator)


def test_jobs_keep_their_images_over_an_upgrade(lab: Lab, operator: Operator, upgraded: Operator) -> None:
    create(lab, "runs")
    create(lab, "waits", suspend=True)
    wait_for_images(lab, operator, "runs", OLD)
    lab.wait(lambda: images(lab, "waits") == OLD, "the sets of the job that waits", operator)
    operator.wait_for_looks()
    before, config = generations(lab, "runs"), lab.must("configmaps", "runs-job")
    assert operator.stop() == 0

    upgraded.start().wait_until_leading()
    lab.wait(lambda: images(lab, "waits") == NEW, "the new operator to look at both", upgraded)
    upgraded.wait_for_looks()
    assert (images(lab, "runs"), generations(lab, "runs")) == (OLD, before)
    assert lab.must("configmaps", "runs-job")["metadata"]["resourceVersion"] == config["metadata"]["resourceVersion"]
    lab.delete("statefulsets", "runs-sim")
    lab.delete("configmaps", "runs-job")
    lab.wait(lambda: lab.get("configmaps", "runs-job") is not None, "the config map to be made again", upgraded)
    wait_for_images(lab, upgraded, "runs", OLD)
    assert "images" not in lab.must("rljobs", "waits")["status"]
    lab.patch("rljobs", "waits", {"spec": {"suspend": False}})
    wait_for_images(lab, upgraded, "waits", NEW)


def test_a_job_is_moved_to_the_next_release(lab: Lab, operator: Operator, upgraded: Operator) -> None:
    create(lab, "moves")
    wait_for_images(lab, operator, "moves", OLD)
    assert operator.stop() == 0
    upgraded.start().wait_until_leading()
    suspend(lab, upgraded, "moves")
    lab.patch("rljobs", "moves", {"spec": {"suspend": False}})
    lab.wait(lambda: lab.must("statefulsets", "moves-trainer")["spec"]["replicas"] == 1, "it to go on", upgraded)
    assert images(lab, "moves") == OLD  # a job that is suspended for a while stays what it is
    suspend(lab, upgraded, "moves")
    lab.delete("configmaps", "moves-job")
    lab.wait(lambda: images(lab, "moves") == NEW, "the images to be taken back", upgraded)
    lab.patch("rljobs", "moves", {"spec": {"suspend": False}})
    wait_for_images(lab, upgraded, "moves", NEW)
