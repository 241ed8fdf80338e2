"""What each account may do at a real API server when somebody else has its token: what docs/reference/rights.md says, and no more."""

import tempfile
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from ruamel.yaml import YAML

from cluster.harness import kubeconfigs
from cluster.harness.api import GROUP, Api
from cluster.harness.control_plane import ControlPlane
from cluster.harness.processes import wait_until
from cluster.members import ACCOUNT, ACCOUNT_NAMESPACE, Pair, operator_with_members
from cluster.operators import SOON_S, Lab, Operator
from support.chart import CHART, runner
from support.jobs import simulated_job
from support.rights_table import Right, documented

pytestmark = pytest.mark.timeout(300)

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_PATHS = {"ServiceAccount": "/api/v1", "Role": _RBAC, "RoleBinding": _RBAC}
ALL = "clusters.enabled=true,kueue.enabled=true,gangs.enabled=true,numbers=Proxy,ui.enabled=true,ui.tokenSecret=page,ui.askSchedulers=true,uninstall.jobs=Delete"
ACCOUNTS = ("streamrl", "streamrl-ui", "streamrl-uninstall")


def rules(api: Api, namespace: str) -> set[tuple[str, str, str, str]]:
    """(group, resource, name, verb) of all that the caller may do in a namespace."""
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "spec": {"namespace": namespace}}
    answer = api.create("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", body).expect()["status"]
    return {
        (group, resource, name, verb)
        for rule in answer["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


class Callers:
    """Makes clients of API servers, and closes them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def of(self, kubeconfig: Path) -> Api:
        """Whoever has the kubeconfig."""
        return self._stack.enter_context(Api(kubeconfig))

    def account(self, plane: ControlPlane, namespace: str, name: str) -> Api:
        """Whoever has a token of the account."""
        return self.of(plane.kubeconfig_of_account(namespace, name))

    def stolen(self, plane: ControlPlane, user: kubeconfigs.User) -> Api:
        """Whoever tries a credential that is of another place."""
        original = YAML(typ="safe").load(plane.kubeconfig.read_text())
        return self.of(kubeconfigs.derive(plane.folder / "stolen.json", original, user))

    def rules_of_any(self, plane: ControlPlane, namespace: str) -> set[tuple[str, str, str, str]]:
        """What an account may do that nothing was granted to."""
        return rules(self.account(plane, namespace, "default"), namespace)


@pytest.fixture
def callers() -> Iterator[Callers]:
    """As other people."""
    with ExitStack() as stack:
        yield Callers(stack)


def table(account: str, where: str, **options: bool) -> set[tuple[str, str, str, str]]:
    return {Right(*one)[2:] for one in documented(**options) if (one.account, one.where) == (account, where)}


@pytest.fixture
def elsewhere(own_control_plane: ControlPlane, namespace: str) -> Iterator[str]:
    """Another team's namespace, with a Secret."""
    api, name = own_control_plane.api, f"{namespace}-else"
    api.create("/api/v1/namespaces", {"metadata": {"name": name}}).expect()
    api.create(f"/api/v1/namespaces/{name}/secrets", {"metadata": {"name": "theirs"}}).expect()
    yield name
    api.delete(f"/api/v1/namespaces/{name}")


def install(plane: ControlPlane, namespace: str, *values: str) -> None:
    """Make the chart's accounts, Roles and bindings, as `helm install` would."""
    with tempfile.TemporaryDirectory(prefix="streamrl-helm-") as home:
        given = [part for value in values for part in ("--set", value)]
        text = runner(Path(home))(
            "template", "streamrl", str(CHART), "--namespace", namespace, "--kube-version", "1.34", *given
        )
    for one in filter(None, YAML(typ="safe").load_all(text.stdout)):
        if one["kind"] in _PATHS:
            metadata = one["metadata"]
            path = f"{_PATHS[one['kind']]}/namespaces/{metadata['namespace']}/{one['kind'].lower()}s/{metadata['name']}"
            plane.api.patch(path, one, kind="apply", fieldManager="streamrl-tests", force="true").expect()


def test_an_operator_of_a_list_of_namespaces_has_no_right_on_secrets_elsewhere(
    callers: Callers, own_control_plane: ControlPlane, namespace: str, elsewhere: str
) -> None:
    watched, plane = f"{namespace}-watched", own_control_plane
    plane.api.create("/api/v1/namespaces", {"metadata": {"name": watched}}).expect()
    install(plane, namespace, ALL, f"watchNamespaces={{{watched}}}")
    api, anyone = callers.account(plane, namespace, ACCOUNTS[0]), callers.rules_of_any(plane, "default")
    wait_until(lambda: api.get(f"/api/v1/namespaces/{watched}/secrets").ok, what="the Role", deadline_s=SOON_S)
    for name in ACCOUNTS:
        account = callers.account(plane, namespace, name)
        assert rules(account, watched) - anyone == table(name, "watched")
        assert rules(account, namespace) - anyone == table(name, "own")
        for other in (elsewhere, "kube-system", "default"):
            assert rules(account, other) - anyone == set(), (name, other)
    theirs = f"/api/v1/namespaces/{elsewhere}/secrets"
    assert {
        "get": api.get(f"{theirs}/theirs").code,
        "list": api.get(theirs).code,
        "list of all": api.get("/api/v1/secrets").code,
        "create": api.create(theirs, {"metadata": {"name": "ours"}}).code,
        "patch": api.patch(f"{theirs}/theirs", {"data": {}}).code,
        "delete": api.delete(f"{theirs}/theirs").code,
    } == dict.fromkeys(("get", "list", "list of all", "create", "patch", "delete"), 403)


def job_named(name: str) -> dict[str, Any]:
    document = simulated_job()
    document["metadata"]["name"] = name
    return document


def attempts(api: Api, namespace: str, victim: str) -> dict[str, int]:
    """What somebody tries with a stolen token, and the API server's answers."""
    core, apps = f"/api/v1/namespaces/{namespace}", f"/apis/apps/v1/namespaces/{namespace}"
    jobs, pod = f"{GROUP}/namespaces/{namespace}/rljobs", f"/api/v1/namespaces/{namespace}/pods/{victim}-trainer-0"
    container = {"name": "c", "image": "i"}
    own_pod = {"metadata": {"name": "p"}, "spec": {"serviceAccountName": "default", "containers": [container]}}
    binding = {
        "metadata": {"name": "b"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "admin"},
    }
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []}}
    return {
        "read a Secret of another job": api.get(f"{core}/secrets/{victim}-ca").code,
        "list Secrets": api.get(f"{core}/secrets").code,
        "list Secrets of all namespaces": api.get("/api/v1/secrets").code,
        "read the resolved job": api.get(f"{core}/configmaps/{victim}-job").code,
        "patch a StatefulSet": api.patch(f"{apps}/statefulsets/{victim}-trainer", {"spec": {"replicas": 9}}).code,
        "delete a pod": api.delete(pod).code,
        "exec": api.create(f"{pod}/exec", {}, command="id", container="trainer", stdout="true").code,
        "read a log": api.get(f"{pod}/log").code,
        "make a pod of another account": api.create(f"{core}/pods", own_pod).code,
        "take a token of another account": api.create(f"{core}/serviceaccounts/default/token", request).code,
        "change a job": api.patch(f"{jobs}/{victim}", {"spec": {"suspend": True}}).code,
        "change a job's status": api.patch(f"{jobs}/{victim}/status", {"status": {"step": 9}}).code,
        "list clusters": api.get(f"{GROUP}/rlclusters").code,
        "make a cluster": api.create(
            f"{GROUP}/rlclusters",
            {"apiVersion": "streamrl.io/v1alpha1", "kind": "RLCluster", "metadata": {"name": "c"}},
        ).code,
        "bind itself": api.create(f"{_RBAC}/namespaces/{namespace}/rolebindings", binding).code,
        "open a policy": api.delete(
            f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies/{victim}-trainer"
        ).code,
        "list nodes": api.get("/api/v1/nodes").code,
    }


def test_the_account_of_a_jobs_pods_may_do_nothing(
    callers: Callers, lab: Lab, operator: Operator, own_control_plane: ControlPlane
) -> None:
    for name in ("thief", "victim"):
        lab.create("rljobs", job_named(name))
        lab.wait(lambda name=name: lab.get("statefulsets", f"{name}-trainer"), f"{name}'s pods", operator)
    api = callers.account(own_control_plane, lab.namespace, "thief-pods")
    assert rules(api, lab.namespace) == callers.rules_of_any(own_control_plane, lab.namespace)
    codes = attempts(api, lab.namespace, "victim")
    assert set(codes.values()) == {403}, codes


@pytest.fixture
def pair(lab: Lab, own_member: ControlPlane) -> Iterator[Pair]:
    """A namespace at home and one in the member."""
    made = Pair.of(lab, own_member)
    yield made
    made.leave()


def test_what_lies_in_or_for_a_member_leads_nowhere_else(
    callers: Callers, pair: Pair, own_control_plane: ControlPlane, own_member: ControlPlane, elsewhere: str
) -> None:
    """The credential of home's operator in a member, and the Secrets that lie in the member for its generators."""
    operator = operator_with_members(own_control_plane, pair.lab.namespace).start().wait_until_leading()
    try:
        pair.join()
        pair.wait_connected(operator)
        for name in ("first", "second"):
            document = job_named(name)
            document["spec"]["generators"][0]["clusterName"] = pair.name
            pair.lab.create("rljobs", document)
            there = f"{name}-tls-generator"
            pair.lab.wait(lambda there=there: pair.there.get("secrets", there), f"{there} in the member", operator)
        the_kubeconfig_leads_nowhere_else(callers, pair, own_control_plane, own_member)
        the_secrets_are_a_generators_alone(callers, pair, own_control_plane)
        for name in ("first", "second"):
            pair.lab.delete("rljobs", name)
        pair.lab.wait(lambda: not pair.lab.list("rljobs"), "the jobs to go", operator)
    finally:
        assert operator.stop() == 0, operator.tail()


def the_kubeconfig_leads_nowhere_else(callers: Callers, pair: Pair, home: ControlPlane, member: ControlPlane) -> None:
    api, anyone = callers.of(pair.kubeconfig), callers.rules_of_any(member, "default")
    assert rules(api, pair.there.namespace) - anyone == table(ACCOUNT, "member", conditional=False)
    assert rules(api, "kube-system") - anyone == table(ACCOUNT, "kube-system")
    for other in ("default", ACCOUNT_NAMESPACE):
        assert rules(api, other) - anyone == set(), other
        codes = attempts(api, other, "first")
        assert set(codes.values()) == {403}, codes
    mapped = attempts(api, pair.there.namespace, "second")
    granted = {what for what, code in mapped.items() if code != 403}
    assert granted == {
        "read a Secret of another job",
        "list Secrets",
        "read the resolved job",
        "patch a StatefulSet",
        "delete a pod",
        "open a policy",
    }, mapped
    at_home = callers.stolen(home, kubeconfigs.current(YAML(typ="safe").load(pair.kubeconfig.read_text()))[1])
    assert {at_home.get(f"/api/v1/namespaces/{one}/secrets").code for one in (pair.lab.namespace, "default")} == {401}


def the_secrets_are_a_generators_alone(callers: Callers, pair: Pair, home: ControlPlane) -> None:
    found = {one["metadata"]["name"]: one["data"] for one in pair.there.list("secrets")}
    assert found.keys() == {"first-tls-generator", "second-tls-generator"}
    authorities = {}
    for name in ("first", "second"):
        data = found[f"{name}-tls-generator"]
        assert data.keys() == {"ca.crt", "tls.crt", "tls.key"}
        leaf = x509.load_pem_x509_certificate(b64decode(data["tls.crt"]))
        authority = x509.load_pem_x509_certificate(b64decode(data["ca.crt"]))
        (uri,) = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(
            x509.UniformResourceIdentifier
        )
        assert uri == f"streamrl://{pair.lab.namespace}/{name}/generator/{pair.name}"
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        leaf.verify_directly_issued_by(authority)
        key = load_pem_private_key(b64decode(data["tls.key"]), None).public_key()
        assert key == leaf.public_key() != authority.public_key()
        authorities[name] = authority
        at_home = callers.stolen(home, {"client-certificate-data": data["tls.crt"], "client-key-data": data["tls.key"]})
        assert at_home.get(f"/api/v1/namespaces/{pair.lab.namespace}/secrets").code == 401
    assert authorities["first"].public_key() != authorities["second"].public_key()
