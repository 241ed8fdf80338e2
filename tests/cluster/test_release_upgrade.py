"""From the chart and the operator of the last landing to these, by Helm, with a job that runs: it stays as it is, and what begins later is of the new release.

`releases/COMMIT.tar.xz` is that landing's chart and operator, since a checkout may have no history. To renew it after a landing:
git archive COMMIT helm/streamrl operator pages crds/streamrl, without dashboards, packed by `tar -c helm operator pages crds | xz -9e`.
"""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.harness.control_plane import ControlPlane
from cluster.operators import USER, Lab, Operator
from support.chart import CHART, runner
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)
(LANDING,) = (Path(__file__).parent / "releases").glob("*.tar.xz")
SETS = ("trainer", "sim")
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def landing(tmp_path: Path) -> Path:
    """The last landing's tree."""
    with tarfile.open(LANDING) as archive:
        archive.extractall(tmp_path / "landing", filter="data")
    return tmp_path / "landing"


@pytest.fixture
def old_crds(own_control_plane: ControlPlane, landing: Path) -> Iterator[None]:
    """The landing's CustomResourceDefinitions; the present ones at the end, whatever happens."""
    for file in sorted((landing / "helm/streamrl/files/crds").glob("*.yaml")):
        body = YAML(typ="safe", pure=True).load(file.read_text())
        path = f"{DEFINITIONS}/{body['metadata']['name']}"
        own_control_plane.api.patch(path, body, kind="apply", fieldManager="streamrl-tests", force="true").expect()
    yield
    own_control_plane.apply_crds()


def create(lab: Lab, name: str, **pod: Any) -> None:
    document = simulated_job()
    document["metadata"]["name"] = name
    document["spec"]["trainer"]["pod"] = pod
    lab.create("rljobs", document)


def templates(lab: Lab, job: str) -> list[dict[str, Any]]:
    """(generation, template) of the job's StatefulSets; empty before they are made."""
    found = [lab.get("statefulsets", f"{job}-{name}") for name in SETS]
    return [{"is": one["metadata"]["generation"], "of": one["spec"]["template"]} for one in found if one]


@pytest.mark.usefixtures("old_crds")
def test_a_running_job_stays_as_it_is(
    lab: Lab, own_control_plane: ControlPlane, namespace: str, landing: Path, tmp_path: Path
) -> None:
    helm = runner(tmp_path, own_control_plane.kubeconfig)
    options = ("--namespace", namespace, "--set", "crds.install=false")
    confined = ("--set", f"watchNamespaces={{{namespace}}},replicas=0")
    helm("install", "rl", str(landing / "helm/streamrl"), *options, *confined)
    code = os.pathsep.join(str(landing / part) for part in ("operator", "pages", "crds"))
    old = Operator(own_control_plane, namespace, name="landed", PYTHONPATH=code).start().wait_until_leading()
    new = Operator(own_control_plane, namespace, name="present")
    try:
        create(lab, "runs")
        lab.wait(lambda: len(templates(lab, "runs")) == 2, "the running job", old)
        old.wait_for_looks(2)
        before, job = templates(lab, "runs"), lab.must("configmaps", "runs-job")
        assert old.stop() == 0, old.tail()
        assert not any(
            use.resource == "rljobdefaults" for use in own_control_plane.uses(USER) if use.namespace == namespace
        )

        own_control_plane.apply_crds()
        helm("upgrade", "rl", str(CHART), *options, "--reset-then-reuse-values")
        (role,) = (
            one
            for one in lab.cluster.get("roles", "-n", namespace)["items"]
            if "leader" not in one["metadata"]["name"] and "uninstall" not in one["metadata"]["name"]
        )
        assert any("rljobdefaults" in rule["resources"] for rule in role["rules"])
        spec = {"pod": {"nodeSelector": {"zone": "b"}}}
        defaults = {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLJobDefaults", "metadata": {"name": "default"}}
        lab.create("rljobdefaults", defaults | {"spec": spec})
        new.start().wait_until_leading()
        create(lab, "begins", hostNetwork=False)
        lab.wait(lambda: len(templates(lab, "begins")) == 2, "a job of the new release", new)
        new.wait_for_looks(4)
        assert [one["of"]["spec"]["nodeSelector"] for one in templates(lab, "begins")] == [{"zone": "b"}] * 2
        assert templates(lab, "runs") == before
        assert lab.must("configmaps", "runs-job")["data"] == job["data"]
        assert lab.condition("runs", "Ready")["reason"] != "InvalidSpec"
    finally:
        for operator in (old, new):
            if operator.runs:
                operator.stop()
        helm("uninstall", "rl", "--namespace", namespace, "--no-hooks")
