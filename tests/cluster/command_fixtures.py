"""A job file with code beside it, and `streamrl COMMAND` at a test cluster."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from support.command import Outcome, streamrl

Cli = Callable[..., Outcome]
JOB = """
apiVersion: streamrl.io/v1alpha1
kind: RLJob
metadata: {name: sum}
spec:
  seed: 1
  model: {scratch: {}}
  task:
    dataset: {jsonl: {path: data/questions.jsonl}}
    sampling: {maxTokens: 8}
    rewards:
    - {name: own, python: {function: "rewards:right"}}
  pipeline: {batchGroups: 4, steps: 100}
  generators:
  - {name: fixed, engine: {hf: {}}, scaling: {static: {replicas: 2}}}
  - {name: outside, engine: {hf: {}}, scaling: {external: {initialReplicas: 1}}}
  - {name: own, engine: {hf: {}}, scaling: {auto: {maxReplicas: 4}}}
"""
REWARDS = (
    "import words\n\n\ndef right(*, prompt, completion, answer, metadata):\n    return float(completion == answer)\n"
)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/questions.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "words.py").write_text("")
    path = tmp_path / "sum.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def cli(control_plane: Cluster, namespace: str, capsys: pytest.CaptureFixture[str]) -> Cli:
    """`streamrl COMMAND ...` in the test's namespace, as the administrator."""

    def call(*arguments: str) -> Outcome:
        return streamrl(capsys, *arguments, "--kubeconfig", str(control_plane.kubeconfig), "-n", namespace)

    return call


def stored(cluster: Cluster, namespace: str, path: str) -> dict[str, Any]:
    prefix = GROUP if path.startswith(("rljobs", "generatorpools")) else "/api/v1"
    return cluster.api.get(f"{prefix}/namespaces/{namespace}/{path}").expect()


def context(cluster: Cluster) -> str:
    return str(YAML(typ="safe", pure=True).load(cluster.kubeconfig.read_text())["current-context"])


@pytest.fixture
def patch(control_plane: Cluster, namespace: str) -> Callable[..., dict[str, Any]]:
    """Change the job's status or spec as somebody else."""

    def change(subresource: str = "", manager: str = "test", **body: Any) -> dict[str, Any]:
        path = f"{GROUP}/namespaces/{namespace}/rljobs/sum{subresource}"
        return control_plane.api.patch(path, body, fieldManager=manager).expect()

    return change
