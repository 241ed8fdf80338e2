"""The example in the images that people get: operator, trainer and generator as their Dockerfiles make them, nothing of this machine in them.

Not part of `make e2e`: each worker image brings its own torch (gigabytes, minutes to build and to import): `make e2e-images`.
"""

import json
import sys
from collections.abc import Iterator

import pytest

from cluster.harness import images
from cluster.harness.images import Image
from e2e.jobs import Document, chain_sum, chain_sum_code
from e2e.release import Release
from e2e.stage import Stage

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(5400)]

STEPS = 10
RUN_S = 2400.0
ROLES = ("trainer", "generator")


@pytest.fixture(scope="module")
def worker_images(release: Release) -> Iterator[dict[str, str]]:
    """Role -> the image's name, on the node. The archives go as soon as the node has them: they are large."""
    loaded: dict[str, str] = {}
    for role in ROLES:
        image: Image = images.of_repository(role)
        try:
            loaded[role] = release.cluster.load(image)
        finally:
            image.archive.unlink(missing_ok=True)
    yield loaded


def test_the_example_runs_in_the_images_of_the_dockerfiles(stage: Stage, worker_images: dict[str, str]) -> None:
    stage.apply(chain_sum_code(stage.namespace), in_images(chain_sum(steps=STEPS, evaluate_every=STEPS), worker_images))
    stage.wait_step("chain-sum", 1, deadline_s=RUN_S)
    for name, pod in stage.pods("chain-sum").items():
        used = {one["image"] for one in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])}
        assert used <= set(worker_images.values()), f"{name}: {used}"
        assert "runtimeClassName" not in pod["spec"], name
        where = stage.kubectl("exec", name, "--", "python", "-c", "import torch; print(torch.__file__)")
        assert where.startswith("/opt/venv/"), f"{name}: {where}"
    status = stage.wait_succeeded("chain-sum", deadline_s=RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 0)
    stage.assert_exact("chain-sum")
    lines = (stage.run_dir("chain-sum") / "metrics/evaluations.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["mean_reward"] for line in lines]
    sys.stderr.write(f"held-out rewards: {rewards}\n")
    assert rewards[-1] > rewards[0], rewards


def in_images(job: Document, names: dict[str, str]) -> Document:
    """The job's pods of these images, with no mounts of this machine."""
    spec = job["spec"]
    for role, owners in (("trainer", [spec["trainer"]]), ("generator", spec["generators"])):
        for owner in owners:
            owner["pod"]["image"] = names[role]
            del owner["pod"]["runtimeClassName"]
    return job
