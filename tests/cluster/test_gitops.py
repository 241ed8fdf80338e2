"""What GitOps tools make of RLJobs at a real API server, by their own libraries: how far a job is, and whether an apply changes anything.

The health checks of Argo CD and Flux are those of `docs/gitops.md`.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from cluster.harness import tools
from cluster.harness.api import GROUP
from cluster.harness.base import Cluster
from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator
from cluster.test_operator_ends import tell_end
from cluster.test_operator_unread import make_ready
from streamrl import keys
from streamrl_cli.yaml_document import read_documents
from support.jobs import simulated_job
from support.pages import guides
from support.tree import ROOT

pytestmark = pytest.mark.timeout(300)

Object = dict[str, Any]
Ask = Callable[..., dict[str, list[Any]]]
KINDS = ("RLJob", "RLJobDefaults", "RLCluster")
HEALTH = "resource.customizations.health.streamrl.io_RLJob"
SAID = {
    "wrong": ("InvalidSpec", "Failed", "Degraded", "Failed"),
    "waits": ("Starting", "InProgress", "Progressing", "InProgress"),
    "runs": ("Running", "InProgress", "Progressing", "Current"),
    "suspended": ("Suspended", "InProgress", "Suspended", "InProgress"),
    "failed": ("Failed", "Failed", "Degraded", "Failed"),
    "succeeded": ("Succeeded", "Current", "Healthy", "Current"),
}
"""Job -> its state, and what kstatus, Argo CD and Flux say of it."""
CHANGES: dict[str, Object] = {
    "wrong": {"trainer": {"engine": {"simulated": {}}, "pod": {"hostNetwork": True}}},
    "suspended": {"suspend": True},
    "failed": {"activeDeadlineSeconds": 1},
}
RESYNC_S = "30"
"""Longer than this test: a scheduler that nobody can ask is told of after four."""


@pytest.fixture(scope="module")
def gitops() -> Ask:
    """Ask the tools' libraries."""

    def ask(objects: list[Object], **question: Any) -> dict[str, list[Any]]:
        text = json.dumps({"objects": objects, **question})
        done = subprocess.run(
            [tools.tool("gitops")], input=text, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, list[Any]] = json.loads(done.stdout)
        return said

    return ask


def manifests(namespace: str) -> Iterator[tuple[str, Object]]:
    """(where from, object of ours) of every file in examples/ and every page. An RLJobDefaults has one name, and so a namespace of its own."""
    texts = [(str(path.relative_to(ROOT)), path.read_text("utf-8")) for path in (ROOT / "examples").rglob("*.yaml")]
    texts += [(page.name, fence.text) for page in guides() for fence in page.fences if fence.language == "yaml"]
    found = [(source, each.data) for source, text in sorted(texts) for each in read_documents(text) if each.data]
    for number, (source, document) in enumerate(one for one in found if one[1].get("kind") in KINDS):
        own = f"{namespace}-{number}" if document["kind"] == "RLJobDefaults" else namespace
        name = "default" if own != namespace else f"m{number}-{namespace[-6:]}"
        place = {} if document["kind"] == "RLCluster" else {"namespace": own}
        yield source, document | {"metadata": {**document["metadata"], "name": name, **place}}


def test_tools_see_how_far_a_job_is(own_control_plane: ControlPlane, lab: Lab, namespace: str, gitops: Ask) -> None:
    (page,) = (page for page in guides() if page.name == "docs/gitops.md")
    argo, flux = (YAML(typ="safe", pure=True).load(fence.text) for fence in page.fences)
    unseen = create(lab, "unseen")
    checks = {"lua": argo["data"][HEALTH], "flux": flux["spec"]["healthCheckExprs"][0]}
    said = gitops([unseen], lua=checks["lua"])
    assert (said["kstatus"], said["argo"]) == (["InProgress"], ["Progressing"])
    lab.delete("rljobs", "unseen")

    operator = Operator(own_control_plane, namespace, **{keys.ENV_RESYNC_SECONDS: RESYNC_S}).start()
    try:
        operator.wait_until_leading()
        for name in ("runs", "succeeded", "wrong", "suspended"):
            create(lab, name)
        lab.wait(lambda: len(lab.list("pods")) == 6, "the pods of two jobs", operator)
        make_ready(lab)
        found = {"runs": reached(lab, "runs", operator)}
        tell_end(lab, life="state", of="succeeded")
        for name in ("failed", "waits"):
            create(lab, name)
        found |= {name: reached(lab, name, operator) for name in SAID if name != "runs"}
        said = gitops([found[name] for name in SAID], **checks)
        for number, (name, expected) in enumerate(SAID.items()):
            assert (said["kstatus"][number], said["argo"][number], said["flux"][number]) == expected[1:], name
        table = lab.cluster.kubectl("get", "rlj", "-n", namespace).stdout.splitlines()
        assert table[0].split()[:2] == ["NAME", "STATE"]
        assert dict(line.split()[:2] for line in table[1:])["succeeded"] == "Succeeded"
    finally:
        operator.stop()


def create(lab: Lab, name: str) -> Object:
    document = simulated_job()
    document["metadata"]["name"] = name
    document["spec"] |= CHANGES.get(name, {})
    return lab.create("rljobs", document)


def reached(lab: Lab, name: str, operator: Operator) -> Object:
    """The job in its state, of which all is told."""
    lab.wait(
        lambda: lab.must("rljobs", name).get("status", {}).get("state") == SAID[name][0], f"{name} as it is", operator
    )
    job = lab.must("rljobs", name)
    assert job["status"]["observedGeneration"] == job["metadata"]["generation"]
    return job


def test_a_second_apply_changes_nothing(control_plane: Cluster, namespace: str, gitops: Ask, tmp_path: Path) -> None:
    given = list(manifests(namespace))
    assert {"README.md", "docs/job-defaults.md", "examples/kubernetes/gpus.yaml"} <= {source for source, _ in given}
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": [document for _, document in given]}))
    homes = {document["metadata"].get("namespace", namespace) for _, document in given} - {namespace}

    def kubectl(*arguments: str) -> str:
        return control_plane.kubectl(*arguments, "-f", str(file)).stdout

    def stored() -> list[Object]:
        items: list[Object] = json.loads(kubectl("get", "-o", "json"))["items"]
        return items

    for home in homes:
        control_plane.api.create("/api/v1/namespaces", {"metadata": {"name": home}}).expect()
    try:
        kubectl("apply")
        again = kubectl("apply").splitlines()
        assert [line for line in again if not line.endswith(" unchanged")] == []
        live = stored()
        patches = gitops(live, manifests=[document for _, document in given])["patches"]
        assert [(source, patch) for (source, _), patch in zip(given, patches, strict=True) if patch] == []
        for (source, document), before in zip(given, live, strict=True):
            predicted, first, second = (
                server_side(control_plane, document, **dry) for dry in ({"dryRun": "All"}, {}, {})
            )
            assert predicted["spec"] == first["spec"] == before["spec"], source
            assert (second, second["metadata"]["generation"]) == (first, 1), source
    finally:
        kubectl("delete", "--wait=false", "--ignore-not-found")
        for home in homes:
            control_plane.api.delete(f"/api/v1/namespaces/{home}")


def server_side(cluster: Cluster, document: Object, **query: str) -> Object:
    """Apply it as Argo CD does; with `dryRun` it only asks what would be there, which is its ServerSideDiff."""
    metadata, plural = document["metadata"], f"{document['kind'].lower().removesuffix('s')}s"
    place = f"namespaces/{metadata['namespace']}/" if "namespace" in metadata else ""
    path = f"{GROUP}/{place}{plural}/{metadata['name']}"
    return cluster.api.patch(
        path, document, kind="apply", fieldManager="argocd-controller", force="true", **query
    ).expect()
