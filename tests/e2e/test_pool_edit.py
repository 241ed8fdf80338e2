"""A pool's image is changed while the job runs: its pods are replaced one by one, each after it has drained."""

import pytest

from cluster.harness.images import WORKER_IMAGE
from cluster.operators import Operator
from e2e.jobs import simulated
from e2e.stage import Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = "rolled"
OTHER_IMAGE = f"{WORKER_IMAGE}-renamed"
"""The same image by another name."""
LONG = {"slots": 4, "latency": [{"batch": 1, "milliseconds": 10.0}], "meanTokens": 200.0}
"""A sample takes 2 s: there is always something to finish when a pod is told to go."""
BEGUN_STEPS, MORE_STEPS = 2, 2
REPLACED_S = 300.0


def generators(stage: Stage) -> dict[str, str]:
    """Ready generators of the job, and the image that each was made with."""
    pods = {name: pod for name, pod in stage.pods(JOB).items() if name != f"{names.trainer(JOB)}-0"}
    return {name: pod["spec"]["containers"][0]["image"] for name, pod in pods.items()}


def test_an_image_is_changed_one_generator_after_the_other(watched: tuple[Stage, Operator]) -> None:
    stage, _ = watched
    stage.nodes.the_node.containers.ctr("images", "tag", "--force", WORKER_IMAGE, OTHER_IMAGE)
    job = simulated(JOB, steps=10_000, step_s=0.2, replicas=2, **LONG)
    stage.apply(job)
    stage.wait_step(JOB, BEGUN_STEPS)
    assert set(generators(stage).values()) == {WORKER_IMAGE}
    (pool,) = job["spec"]["generators"]
    stage.change(JOB, generators=[{**pool, "pod": {**pool["pod"], "image": OTHER_IMAGE}}])
    fewest = 2

    def replaced() -> bool:
        nonlocal fewest
        fewest = min(fewest, stage.ready_generators(JOB))
        return (
            set(generators(stage).values()) == {OTHER_IMAGE}
            and stage.ready_generators(JOB) == len(generators(stage)) == 2
        )

    stage.wait_for(replaced, "both generators with the other image", job=JOB, deadline_s=REPLACED_S)
    assert fewest == 1, "one goes on while the other is replaced"
    stage.wait_step(JOB, stage.page(JOB)["step"] + MORE_STEPS)
    stage.change(JOB, suspend=True)
    stage.wait_for(lambda: not stage.pods(JOB), "no pods", job=JOB, deadline_s=REPLACED_S)
    stage.assert_exact(JOB)
    status = stage.status(JOB)
    assert (status["restarts"], status.get("ignoredRestarts", 0)) == (0, 0), "an ordered end is no failure"
