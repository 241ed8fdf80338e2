"""Pods as people write them, at a real API server: the job is stored, and its StatefulSets are taken and kept as planned."""

from typing import Any

import pytest

from cluster.harness.api import GROUP, Answer
from cluster.harness.base import Cluster
from streamrl.errors import UserErrors
from streamrl.names import service_account
from streamrl.spec import parse_job
from streamrl_operator.planning.compare import differs
from support.planned import planned
from support.pod_corpus import ACCEPTED, REFUSED, Snippet

ENFORCED = {"pod-security.kubernetes.io/enforce": "restricted"}
CLASSES = ("priorityClassName", "runtimeClassName")
TOOLS = (
    *("app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "argocd.argoproj.io/tracking-id"),
    *("helm.sh/chart", "meta.helm.sh/release-name", "kustomize.toolkit.fluxcd.io/name", "helm.toolkit.fluxcd.io/name"),
    *(
        "kueue.x-k8s.io/queue-name",
        "kubectl.kubernetes.io/last-applied-configuration",
        "applyset.kubernetes.io/part-of",
    ),
    *("config.k8s.io/owning-inventory", "kapp.k14s.io/app", "streamrl.io/job"),
)
AT_RUNTIME = ("container.apparmor.security.beta.kubernetes.io/trainer", "io.kubernetes.cri-o.Devices")


def by_name(snippet: Snippet) -> str:
    return snippet.name


def dry_run_pod(control_plane: Cluster, namespace: str, template: dict[str, Any]) -> Answer:
    """The answer to a pod of the template, without the classes, which no cluster of ours has."""
    spec = {key: value for key, value in template["spec"].items() if key not in CLASSES}
    metadata = template["metadata"] | {"name": "p-0"}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return control_plane.api.create(f"/api/v1/namespaces/{namespace}/pods", body, dryRun="All")


@pytest.mark.parametrize("snippet", ACCEPTED, ids=by_name)
def test_an_accepted_snippet_becomes_pods(control_plane: Cluster, namespace: str, snippet: Snippet) -> None:
    """What the API server gives back means the same to us, and asks for no second write; Pod Security "restricted" takes the pods."""
    api = control_plane.api
    api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": ENFORCED}}).expect()
    account = {"metadata": {"name": service_account(snippet.name)}}
    api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", account).expect()
    stored = api.create(f"{GROUP}/namespaces/{namespace}/rljobs", snippet.job()).expect()
    plain = {key: stored[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": snippet.name}}
    job = parse_job(plain)
    assert job.spec == parse_job(snippet.job()).spec
    sets = [each for each in planned(job) if each["kind"] == "StatefulSet"]
    assert len(sets) == 2
    for wanted in sets:
        own = wanted | {"metadata": wanted["metadata"] | {"namespace": namespace}}
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets"
        made = api.create(path, own, dryRun="All").expect()
        assert not differs(own, made)
        answer = dry_run_pod(control_plane, namespace, wanted["spec"]["template"])
        beyond = "hostNetwork=true" in answer.message if snippet.pod.get("hostNetwork") else False
        assert answer.ok or beyond, answer.message


@pytest.mark.parametrize("snippet", REFUSED, ids=by_name)
def test_a_refused_snippet_is_not_stored(control_plane: Cluster, namespace: str, snippet: Snippet) -> None:
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    answer = control_plane.api.create(path, snippet.job(), dryRun="All")
    where, why = snippet.refused.split(": ", 1)
    said = why if why.startswith("is refused") else where.rpartition(".")[2]
    assert (answer.code in (400, 422), said in answer.message) == (True, True), answer.message


@pytest.mark.parametrize("part", ["labels", "annotations"])
def test_no_object_of_a_job_gets_a_key_of_a_tool(control_plane: Cluster, namespace: str, part: str) -> None:
    """A claim that outlives its job would be deleted by the tool whose key it has."""
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    for key in (*TOOLS, *(AT_RUNTIME if part == "annotations" else ())):
        document = ACCEPTED[0].job()
        document["spec"]["commonMetadata"] = {part: {key: "x"}}
        answer = control_plane.api.create(path, document, dryRun="All")
        assert (answer.code, " must not have keys of" in answer.message) == (422, True), (key, answer.message)
        with pytest.raises(UserErrors, match=f"got {key}"):
            parse_job(document)
