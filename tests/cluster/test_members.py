"""Pools in a member cluster, on two real control planes: what is made there, what home says of it, and what is left.

There are no kubelets: pods stay pending.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.harness.kubeconfigs import current
from cluster.members import USER, Pair, admit, install_gateway_api, made_there, operator_with_members, wait_gone
from cluster.operators import Lab, Operator, refused
from support.command import streamrl
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB = "far"
THERE = f"{JOB}-away"
LATE_S = 180.0
"""Three questions, and the pause between two attempts to connect, on a machine that does much else."""


def job(cluster: str, **spec: Any) -> dict[str, Any]:
    """A job with a pool at home and one in a member."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    engine = document["spec"]["generators"][0]["engine"]
    document["spec"]["generators"] = [
        {"name": "near", "engine": engine, "scaling": {"static": {"replicas": 1}}},
        {"name": "away", "engine": engine, "scaling": {"static": {"replicas": 2}}, "clusterName": cluster},
    ]
    document["spec"] |= spec
    return document


MADE_THERE = {
    "serviceaccounts": {f"{JOB}-pods"},
    "configmaps": {f"{JOB}-job", f"{JOB}-anchor"},
    "secrets": {f"{JOB}-tls-generator"},
    "services": {THERE},
    "networkpolicies": {THERE},
    "poddisruptionbudgets": {THERE},
    "statefulsets": {THERE},
}


@pytest.fixture
def pair(lab: Lab, own_member: ControlPlane) -> Iterator[Pair]:
    """A namespace at home and one in the member, not joined yet."""
    made = Pair.of(lab, own_member)
    yield made
    made.leave()


@pytest.fixture
def gateway_api(own_control_plane: ControlPlane) -> None:
    """Home has TLSRoutes, from before its operator begins."""
    install_gateway_api(own_control_plane)


@pytest.fixture
def operator(
    own_control_plane: ControlPlane, namespace: str, pair: Pair, request: pytest.FixtureRequest
) -> Iterator[Operator]:
    """An operator that follows RLClusters and is refused nothing."""
    if "gateway_api" in request.fixturenames:
        request.getfixturevalue("gateway_api")
    made = operator_with_members(own_control_plane, namespace).start()
    yield made.wait_until_leading()
    if made.runs:
        assert made.stop() == 0, made.tail()
    assert refused(own_control_plane, namespace) == set(), "asked for, and not granted by the chart (_rbac.tpl)"


def start(pair: Pair, operator: Operator) -> None:
    """Until the member has all of the job, and its pods."""
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(lambda: made_there(pair.there, JOB) == MADE_THERE, "the job's objects in the member", operator)
    pair.lab.wait(lambda: len(pair.there.list("pods")) == 2, "the pods in the member", operator, deadline_s=LATE_S)


def test_a_pool_is_made_in_the_member_and_deleting_the_job_leaves_nothing_there(pair: Pair, operator: Operator) -> None:
    pair.join()
    pair.wait_connected(operator)
    start(pair, operator)
    anchor = pair.there.must("configmaps", f"{JOB}-anchor")
    assert "ownerReferences" not in anchor["metadata"]
    for plural, found in MADE_THERE.items():
        for name in found - {f"{JOB}-anchor"}:
            (owner,) = pair.there.must(plural, name)["metadata"]["ownerReferences"]
            assert owner["uid"] == anchor["metadata"]["uid"], (plural, name)
    at_home = pair.lab.must("rljobs", JOB)
    (entry,) = at_home["status"]["clusters"]
    assert (entry["name"], entry["namespace"]) == (pair.name, pair.there.namespace)
    assert pair.lab.get("statefulsets", THERE) is None
    assert pair.lab.must("generatorpools", THERE)["spec"]["replicas"] == 2
    container = pair.there.must("statefulsets", THERE)["spec"]["template"]["spec"]["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    uid8 = at_home["metadata"]["uid"][:8]
    assert environment["STREAMRL_CLUSTER"] == pair.name
    assert environment["STREAMRL_SCHEDULER_ADDRESS"] == "10.9.8.7:4430"
    assert environment["STREAMRL_SCHEDULER_TLS_NAME"] == f"scheduler.{uid8}.streamrl.internal"
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator)
    wait_gone(pair.there, JOB, operator)


def forbid_more_than(member: ControlPlane, namespace: str, *, cpu: str) -> None:
    """A policy of the member: a container of a StatefulSet may ask for no more."""
    rule = f"object.spec.template.spec.containers.all(c, !('requests' in c.resources) || !('cpu' in c.resources.requests) || quantity(c.resources.requests.cpu).compareTo(quantity('{cpu}')) <= 0)"
    matched = {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["statefulsets"], "operations": ["CREATE"]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [matched]},
        "validations": [{"expression": rule, "message": f"at most {cpu} processors"}],
    }
    bound = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": bound}
    group = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
    member.api.create(f"{group}ies", {"metadata": {"name": namespace}, "spec": spec}).expect()
    member.api.create(f"{group}ybindings", {"metadata": {"name": namespace}, "spec": binding}).expect()


def test_a_pool_that_the_member_refuses_holds_up_the_trainer_at_home(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    forbid_more_than(own_member, pair.there.namespace, cpu="63")
    pair.join()
    document = job(pair.name)
    pods = [one | {"pod": {"resources": {"requests": {"cpu": "64"}}}} for one in document["spec"]["generators"]]
    document["spec"]["generators"] = [document["spec"]["generators"][0], pods[1]]
    pair.lab.create("rljobs", document)

    def is_refused() -> bool:
        ready = pair.lab.condition(JOB, "Ready")
        return ready.get("reason") == "ClusterRefused" and "at most 63 processors" in ready["message"]

    pair.lab.wait(is_refused, "the member's words in Ready", operator, deadline_s=LATE_S)
    operator.wait_for_looks()
    assert {one["spec"]["replicas"] for one in pair.lab.list("statefulsets")} == {0}
    assert pair.lab.list("pods") == pair.there.list("pods") == []
    change = [{"op": "replace", "path": "/spec/generators/1/pod/resources/requests/cpu", "value": "1"}]
    pair.lab.patch("rljobs", JOB, change, kind="json")
    pair.lab.wait(lambda: len(pair.there.list("pods")) == 2, "the pods in the member", operator, deadline_s=LATE_S)


def test_the_members_credential_touches_the_jobs_objects_alone(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    pair.join()
    start(pair, operator)
    pair.wait_connected(operator)
    pair.lab.wait(lambda: pair.condition("Authorized").get("status") == "True", "Authorized", operator)
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator)
    uses = [use for use in own_member.uses(USER) if use.namespace in (pair.there.namespace, "kube-system", "")]
    writes = {(use.resource, use.name) for use in uses if use.verb in ("create", "update", "patch", "delete")}
    asked = {("selfsubjectaccessreviews", "")}
    assert writes - asked == {(plural, name) for plural, found in MADE_THERE.items() for name in found}
    assert all(use.code < 400 or use.code in (404, 409) for use in uses), [use for use in uses if use.code >= 400]


def test_a_namespace_that_is_not_mapped_is_refused(pair: Pair, operator: Operator) -> None:
    pair.join(hub="somebody-elses")
    pair.wait_connected(operator)
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(
        lambda: pair.lab.condition(JOB, "Ready").get("reason") == "ClusterNotAllowed", "ClusterNotAllowed", operator
    )
    assert made_there(pair.there, JOB) == {plural: set() for plural in MADE_THERE}


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ({"exec": {"command": "true", "apiVersion": "client.authentication.k8s.io/v1"}}, "user may have only"),
        ({"tokenFile": "/etc/passwd"}, "user may have only"),
    ],
    ids=["exec", "tokenFile"],
)
def test_a_kubeconfig_that_reaches_out_is_refused(
    pair: Pair, operator: Operator, mistake: dict[str, Any], told: str
) -> None:
    config = json.loads(pair.kubeconfig.read_text())
    config["users"][0]["user"] |= mistake
    pair.join(text=json.dumps(config))
    pair.lab.wait(
        lambda: pair.condition("Connected").get("reason") == "KubeconfigRefused", "KubeconfigRefused", operator
    )
    assert told in pair.condition("Connected")["message"]


def both(pair: Pair, path: Path) -> Path:
    """A kubeconfig with the contexts `home` and `east`, of administrators."""
    merged: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "current-context": "home"}
    for name, cluster in (("home", pair.lab.cluster), ("east", pair.there.cluster)):
        server, user = current(json.loads(cluster.kubeconfig.read_text()))
        merged.setdefault("clusters", []).append({"name": name, "cluster": server})
        merged.setdefault("users", []).append({"name": name, "user": user})
        merged.setdefault("contexts", []).append({"name": name, "context": {"cluster": name, "user": name}})
    path.write_text(json.dumps(merged))
    return path


def test_streamrl_cluster_joins_lists_and_leaves(
    pair: Pair, operator: Operator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--kubeconfig", str(both(pair, tmp_path / "config")), "--operator-namespace", pair.lab.namespace)
    mapped = f"{pair.lab.namespace}={pair.there.namespace}"
    asked = ("--member-context", "east", "--map", mapped, "--node-port", "192.0.2.7")
    admit(pair.there.cluster, pair.there.namespace, trainers=True)
    done = streamrl(capsys, "cluster", "join", pair.name, *asked, "--trainers", "192.0.2.8", *config)
    assert done.code == 0, done.err
    pair.wait_connected(operator)
    given = pair.lab.cluster.api.get(pair.path).expect()["spec"]
    assert given["trainers"] == {"exposure": {"nodePort": {"host": "192.0.2.8"}}}
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(lambda: made_there(pair.there, JOB) == MADE_THERE, "the job's objects in the member", operator)
    ports = {one["name"]: one["nodePort"] for one in pair.lab.must("services", f"{JOB}-exposed")["spec"]["ports"]}
    container = pair.there.must("statefulsets", THERE)["spec"]["template"]["spec"]["containers"][0]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert environment["STREAMRL_SCHEDULER_ADDRESS"] == f"192.0.2.7:{ports['grpc']}"
    assert environment["STREAMRL_WEIGHTS_ADDRESS"] == f"192.0.2.7:{ports['weights']}"
    told = streamrl(capsys, "cluster", "list", *config).out
    assert [pair.name, "True"] in [line.split()[:2] for line in told]
    look = (JOB, *config[:2], "-n", pair.lab.namespace)
    pair.lab.wait(lambda: len(pair.there.list("pods")) == 2, "the pods in the member", operator, deadline_s=LATE_S)
    told = streamrl(capsys, "status", *look, "--member-context", "east").out
    assert {f"{THERE}-0", f"{THERE}-1"} <= {line.split()[0] for line in told if line.split()}
    elsewhere = streamrl(capsys, "logs", *look, "--pool", "away")
    assert (elsewhere.code, f"has its pods in member cluster {pair.name}" in elsewhere.err[0]) == (2, True)
    assert streamrl(capsys, "cluster", "leave", pair.name, *config).code == 0
    pair.lab.wait(
        lambda: "waits for 1 jobs" in pair.condition("Connected").get("message", ""), "what it waits for", operator
    )
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.cluster.api.get(pair.path).code == 404, "the RLCluster to go", operator)
    wait_gone(pair.there, JOB, operator)


def test_a_suspended_job_has_no_pods_there_though_its_load_balancer_has_lost_its_address(
    pair: Pair, operator: Operator
) -> None:
    pair.join(exposure={"loadBalancer": {}})
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(lambda: pair.lab.get("services", f"{JOB}-exposed") is not None, "the exposed Service", operator)
    given = {"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.8"}]}}}
    pair.lab.patch("services", f"{JOB}-exposed", given, part="status")
    pair.lab.wait(lambda: len(pair.there.list("pods")) == 2, "the pods in the member", operator, deadline_s=LATE_S)
    pair.lab.patch("services", f"{JOB}-exposed", {"status": {"loadBalancer": None}}, part="status")
    pair.lab.patch("rljobs", JOB, {"spec": {"suspend": True}})
    pair.lab.wait(lambda: pair.there.list("pods") == [], "no pods in the member", operator)
    pair.lab.wait(lambda: pair.lab.condition(JOB, "Suspended").get("status") == "True", "Suspended", operator)


@pytest.mark.usefixtures("gateway_api")
def test_a_gateway_is_asked_to_pass_the_jobs_names_through(pair: Pair, operator: Operator) -> None:
    pair.join(exposure={"gateway": {"name": "edge", "namespace": "infra", "host": "edge.example"}})
    start(pair, operator)
    uid8 = pair.lab.must("rljobs", JOB)["metadata"]["uid"][:8]
    found = {one["metadata"]["name"]: one["spec"]["hostnames"] for one in pair.lab.list("tlsroutes")}
    assert found == {f"{JOB}-{of}": [f"{of}.{uid8}.streamrl.internal"] for of in ("scheduler", "weights")}
    pair.lab.wait_until_quiet(JOB, operator)
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator)
    assert pair.lab.list("tlsroutes") == []
