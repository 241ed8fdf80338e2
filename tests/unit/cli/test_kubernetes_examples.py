"""The examples that people copy: each is valid, and becomes what its text says. The first is applied in tests/cluster."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.yaml_document import read_documents
from support.command import streamrl
from support.tree import ROOT

FOLDER = ROOT / "examples/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))


def documents(path: Path) -> list[Any]:
    return [document.data for document in read_documents(path.read_text())]


def pods(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Pod templates' specs by StatefulSet."""
    outcome = streamrl(capsys, "plan", *arguments, "-o", "json")
    assert (outcome.code, outcome.err) == (0, [])
    items = json.loads("\n".join(outcome.out))["items"]
    return {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in items if one["kind"] == "StatefulSet"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_is_valid(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    outcome = streamrl(capsys, "validate", "--spec-only", str(path))
    assert (outcome.code, outcome.err) == (0, [])


def test_the_first_needs_nothing_before_it() -> None:
    code, job = documents(FOLDER / "chain-sum.yaml")
    assert code["data"] == {"chain_sum.py": (ROOT / "examples/chain_sum.py").read_text()}
    assert job["spec"]["task"]["code"]["configMapName"] == code["metadata"]["name"]
    assert job == documents(ROOT / "examples/chain-sum-k8s.yaml")[0]


def test_gpus_stand_where_they_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    found = pods(capsys, str(FOLDER / "gpus.yaml"))
    gpus = {name: spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for name, spec in found.items()}
    assert gpus == {"qwen3-8b-trainer": "8", "qwen3-8b-l40s": "1", "qwen3-8b-h100": "1"}
    products = {name: spec["nodeSelector"]["nvidia.com/gpu.product"] for name, spec in found.items()}
    assert products["qwen3-8b-l40s"] != products["qwen3-8b-h100"] == products["qwen3-8b-trainer"]
    shared = {name: [one for one in spec["volumes"] if one["name"] == "streamrl-shm"] for name, spec in found.items()}
    assert all(shared.values())
    (job,) = documents(FOLDER / "gpus.yaml")
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}


def test_spot_nodes_are_for_one_pool(capsys: pytest.CaptureFixture[str]) -> None:
    found = pods(capsys, str(FOLDER / "spot.yaml"))
    assert {name for name, spec in found.items() if "nodeSelector" in spec} == {"chain-sum-spot-spot"}
    assert found["chain-sum-spot-spot"]["terminationGracePeriodSeconds"] == 25


def test_the_defaults_are_seen_in_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (str(FOLDER / "spot.yaml"), "--defaults", str(FOLDER / "defaults.yaml"))
    for name, spec in pods(capsys, *arguments).items():
        assert spec["priorityClassName"] == "research"
        assert spec["nodeSelector"]["example.com/team"] == "research"
        ours = [*spec.get("initContainers", []), *spec["containers"]]
        assert all({"name": "HF_HOME", "value": "/models"} in one["env"] for one in ours), name
    lines = [" ".join(line.split()) for line in streamrl(capsys, "plan", *arguments).out]
    source = FOLDER / "defaults.yaml"
    assert f'spec.trainer.pod.nodeSelector.example.com/team "research" {source} enforced' in lines
    assert f'spec.storage.journal.storageClassName "fast" {source}' in lines


def test_a_mistake_in_defaults_has_file_and_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text((FOLDER / "defaults.yaml").read_text().replace("priorityClassName: research", "priority: 3"))
    line = next(number for number, text in enumerate(path.read_text().split("\n"), 1) if "priority: 3" in text)
    for command in (("validate", str(path)), ("plan", str(FOLDER / "spot.yaml"), "--defaults", str(path))):
        outcome = streamrl(capsys, *command)
        assert (outcome.code, outcome.err) == (
            2,
            [f"{path}:{line}: spec.pod.priority: is not a known field; did you mean priorityClassName?"],
        )
