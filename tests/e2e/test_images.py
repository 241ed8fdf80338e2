"""The example in the images that people get: operator, trainer and generator as their Dockerfiles make them, nothing of this machine in them.

Not part of `make e2e`: each worker image brings its own torch (gigabytes, minutes to build and to import): `make e2e-images`.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import images
from e2e.jobs import Document, chain_sum, chain_sum_code, two_engines, two_engines_code
from e2e.release import Release
from e2e.stage import Stage

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(5400)]

STEPS = 10
ENGINES_STEPS = 30
"""Enough to measure the speed of both pools in."""
RUN_S = 2400.0
WORKERS = (("trainer", "generator"), ("generator-vllm",))
"""Those with layers in common are built together."""


@pytest.fixture(scope="module")
def worker_images(release: Release) -> Iterator[dict[str, str]]:
    """Image -> its name on the node. Layers and archives go as soon as nothing needs them: they are large."""
    loaded: dict[str, str] = {}
    for related in WORKERS:
        made = [images.NAMED[worker]() for worker in related]
        archives = [images.archive(image) for image in made]
        images.drop_layers()
        for worker, image, archive in zip(related, made, archives, strict=True):
            try:
                loaded[worker] = release.cluster.load(image)
            finally:
                archive.unlink(missing_ok=True)
    yield loaded


def test_a_change_of_code_leaves_all_layers_but_the_last(release: Release, tmp_path: Path) -> None:
    for name in (".dockerignore", "Dockerfile.operator", *images.CONTEXT):
        copy = shutil.copytree if (images.REPOSITORY / name).is_dir() else shutil.copy
        copy(images.REPOSITORY / name, tmp_path / name)
    with (tmp_path / "operator/streamrl_operator/main.py").open("a") as file:
        file.write("# changed\n")
    first = images.of_repository("operator")
    first.archive.unlink(missing_ok=True)  # the builder may have no layers of it any more
    changed = images.of_repository("operator", "streamrl.test/operator:changed", checkout=tmp_path)
    try:
        was, now = images.layers(first), images.layers(changed)
    finally:
        changed.archive.unlink(missing_ok=True)
    assert (now[:-1], len(now)) == (was[:-1], len(was))
    assert now[-1] != was[-1]


def test_the_example_runs_in_the_images_of_the_dockerfiles(stage: Stage, worker_images: dict[str, str]) -> None:
    stage.apply(chain_sum_code(stage.namespace), in_images(chain_sum(steps=STEPS, evaluate_every=STEPS), worker_images))
    stage.wait_step("chain-sum", 1, deadline_s=RUN_S)
    assert_alone_in_images(stage, {worker_images["trainer"], worker_images["generator"]})
    status = stage.wait_succeeded("chain-sum", deadline_s=RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 0)
    stage.assert_exact("chain-sum")
    lines = (stage.run_dir("chain-sum") / "metrics/evaluations.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["mean_reward"] for line in lines]
    sys.stderr.write(f"held-out rewards: {rewards}\n")
    assert rewards[-1] > rewards[0], rewards


def test_a_pool_of_each_engine_in_the_images_of_the_dockerfiles(stage: Stage, worker_images: dict[str, str]) -> None:
    stage.apply(two_engines_code(stage.namespace), in_images(two_engines(steps=ENGINES_STEPS), worker_images))
    speeds = stage.wait_measured("chain-sum", ("hf", "vllm"), deadline_s=RUN_S)
    assert speeds["hf"] != speeds["vllm"]
    assert_alone_in_images(stage, set(worker_images.values()))
    status = stage.wait_succeeded("chain-sum", deadline_s=RUN_S)
    assert (status["step"], status["restarts"]) == (ENGINES_STEPS, 0)
    stage.assert_exact("chain-sum")


def assert_alone_in_images(stage: Stage, names: set[str]) -> None:
    """The job's pods are of these images and of each of them, with the torch that is in them."""
    used: set[str] = set()
    for name, pod in stage.pods("chain-sum").items():
        used |= {one["image"] for one in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])}
        assert "runtimeClassName" not in pod["spec"], name
        where = stage.kubectl("exec", name, "--", "python", "-c", "import torch; print(torch.__file__)")
        assert where.startswith("/opt/venv/"), f"{name}: {where}"
    assert used == names


def in_images(job: Document, names: dict[str, str]) -> Document:
    """The job's pods of these images, with no mounts of this machine."""
    spec = job["spec"]
    spec["trainer"]["pod"]["image"] = names["trainer"]
    for pool in spec["generators"]:
        pool["pod"]["image"] = names["generator-vllm" if "vllm" in pool["engine"] else "generator"]
    for owner in (spec["trainer"], *spec["generators"]):
        del owner["pod"]["runtimeClassName"]
    return job
