"""The chart on a real API server: admitted, installed, upgraded, uninstalled; its rules as the API server reads them.

There are no nodes, so no pod runs: the tests run the uninstall hook's command themselves, as its ServiceAccount, and say that its pod has
succeeded, as a kubelet would.
"""

import json
import os
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from ruamel.yaml import YAML

from cluster.harness import tools
from cluster.harness.base import Cluster
from cluster.harness.processes import wait_until
from support.chart import CHART, Helm, runner

ROOT = CHART.parents[1]
VALUES = ROOT / "tests/chart/values"
HOOK_S = 240
"""A few seconds on an idle machine."""
NO_CRDS = ("--set", "crds.install=false")
"""The control plane has them: other tests use them too."""
KINDS = "deployments,services,serviceaccounts,roles,rolebindings,networkpolicies,poddisruptionbudgets,jobs,pods"


@pytest.fixture
def helm(control_plane: Cluster, tmp_path: Path) -> Helm:
    return runner(tmp_path, control_plane.kubeconfig)


@pytest.fixture
def release(control_plane: Cluster, helm: Helm, namespace: str) -> Iterator[Callable[..., None]]:
    """Install or upgrade the release `rl`; without hooks it goes at the end."""

    def install(*arguments: str) -> None:
        helm("upgrade", "--install", "rl", str(CHART), "--namespace", namespace, *NO_CRDS, *arguments)

    yield install
    helm("uninstall", "rl", "--namespace", namespace, "--no-hooks", "--ignore-not-found")


def _job(control_plane: Cluster, namespace: str, *, finalizers: list[str], ended: bool = False) -> None:
    job = YAML(typ="safe").load((ROOT / "examples/chain-sum.yaml").read_text())
    job["metadata"] |= {"name": "sums", "finalizers": finalizers}
    control_plane.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=json.dumps(job))
    if ended:
        patch = json.dumps({"status": {"completionTime": "2026-01-01T00:00:00Z"}})
        control_plane.kubectl(
            "patch", "rljob", "sums", "-n", namespace, "--subresource=status", "--type=merge", "-p", patch
        )


def _found(control_plane: Cluster, namespace: str, kind: str = KINDS) -> set[str]:
    items = control_plane.get(kind, "--namespace", namespace, "--selector", "app.kubernetes.io/instance=rl")["items"]
    return {f"{one['kind']}/{one['metadata']['name']}" for one in items}


# ---- Admission


@pytest.mark.parametrize("case", sorted(path.stem for path in VALUES.glob("*.yaml")))
def test_pods_are_admitted_where_only_restricted_ones_are(
    control_plane: Cluster, helm: Helm, namespace: str, case: str
) -> None:
    control_plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    text = helm(
        "template",
        "rl",
        str(CHART),
        "--namespace",
        namespace,
        "--kube-version",
        "1.34",
        *NO_CRDS,
        "--values",
        str(VALUES / f"{case}.yaml"),
    ).stdout
    pods = 0
    for one in YAML(typ="safe").load_all(text):
        if one and one["kind"] in ("Deployment", "Job", "Pod"):
            template = one if one["kind"] == "Pod" else one["spec"]["template"]
            spec = template["spec"] | {"serviceAccountName": "default", "priorityClassName": ""}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": namespace}, "spec": spec}
            pod["spec"].setdefault("restartPolicy", "Always")
            control_plane.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))
            pods += 1
    assert pods == 3 + ("app.kubernetes.io/component: ui" in text)


# ---- Life of a release


def test_install_upgrade_rollback_uninstall(
    control_plane: Cluster, helm: Helm, namespace: str, release: Callable[..., None]
) -> None:
    confined = ("--set", f"watchNamespaces={{{namespace}}}")
    release(*confined)
    first = _found(
        control_plane, namespace, "deployments,services,serviceaccounts,poddisruptionbudgets,networkpolicies"
    )
    assert first == {
        "Deployment/rl-streamrl",
        "Service/rl-streamrl",
        "ServiceAccount/rl-streamrl",
        "NetworkPolicy/rl-streamrl",
    }
    release(*confined, "--set", "replicas=2,resyncSeconds=7")
    deployment = control_plane.get("deployment", "rl-streamrl", "--namespace", namespace)
    assert deployment["spec"]["replicas"] == 2
    env = {one["name"]: one.get("value") for one in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["STREAMRL_RESYNC_SECONDS"] == "7"
    assert env["STREAMRL_NAMESPACES"] == namespace
    assert "PodDisruptionBudget/rl-streamrl" in _found(control_plane, namespace)
    helm("rollback", "rl", "1", "--namespace", namespace)
    assert "PodDisruptionBudget/rl-streamrl" not in _found(control_plane, namespace)
    assert control_plane.get("deployment", "rl-streamrl", "--namespace", namespace)["spec"]["replicas"] == 1
    helm("uninstall", "rl", "--namespace", namespace, "--no-hooks")
    wait_until(lambda: not _found(control_plane, namespace), what="everything of the release gone", deadline_s=HOOK_S)


def test_crds_are_taken_over_and_stay(control_plane: Cluster, helm: Helm, namespace: str) -> None:
    """They were applied by hand before; then they are the release's; then they stay, and RLJobs with them."""
    _job(control_plane, namespace, finalizers=[])
    install = ("install", "rl", str(CHART), "--namespace", namespace, "--set", f"watchNamespaces={{{namespace}}}")
    refused = helm(*install, check=False)
    assert "cannot be imported into the current release" in refused.stderr
    helm(*install, "--take-ownership")
    crd = control_plane.get("crd", "rljobs.streamrl.io")
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    helm("uninstall", "rl", "--namespace", namespace, "--no-hooks")
    assert control_plane.get("rljob", "sums", "--namespace", namespace)["metadata"]["name"] == "sums"


# ---- Uninstalling while there are jobs


@contextmanager
def _uninstalling(control_plane: Cluster, namespace: str) -> Iterator[subprocess.Popen[str]]:
    """`helm uninstall` under way, waiting for its hook."""
    process = subprocess.Popen(
        [str(tools.tool("helm")), "uninstall", "rl", "--namespace", namespace, "--timeout", f"{HOOK_S}s"],
        env=os.environ | {"KUBECONFIG": str(control_plane.kubeconfig)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def _hook_pod(control_plane: Cluster, namespace: str) -> dict[str, Any]:
    selector = ("--namespace", namespace, "--selector", "app.kubernetes.io/component=uninstall")
    wait_until(
        lambda: bool(control_plane.get("pods", *selector)["items"]),
        what="the pod of the uninstall hook",
        deadline_s=HOOK_S,
    )
    pod: dict[str, Any] = control_plane.get("pods", *selector)["items"][0]
    return pod


def _run_hook(
    control_plane: Cluster, namespace: str, pod: dict[str, Any], folder: Path
) -> subprocess.CompletedProcess[str]:
    """What the kubelet would run: the pod's command, with its environment and the token of its ServiceAccount."""
    account = pod["spec"].get("serviceAccountName", "default")
    config = YAML(typ="safe").load(control_plane.kubeconfig_of_account(namespace, account).read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    folder.mkdir()
    (folder / "token").write_text(user["token"])
    (folder / "ca.crt").write_bytes(b64decode(cluster["certificate-authority-data"]))
    address = urlsplit(cluster["server"])
    env = {
        "KUBERNETES_SERVICE_HOST": address.hostname or "",
        "KUBERNETES_SERVICE_PORT": str(address.port),
        "SERVICE_ACCOUNT_DIR": str(folder),
        "POD_NAMESPACE": namespace,
    }
    (container,) = pod["spec"]["containers"]
    env |= {one["name"]: one["value"] for one in container["env"] if "value" in one}
    command = [sys.executable, "-I", *container["command"][1:]]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=HOOK_S, check=False)


def _succeeded(control_plane: Cluster, namespace: str, pod: dict[str, Any]) -> None:
    patch = json.dumps({"status": {"phase": "Succeeded"}})
    name = pod["metadata"]["name"]
    control_plane.kubectl("patch", "pod", name, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


def test_uninstall_keeps_jobs_and_leaves_nothing_to_hang(
    control_plane: Cluster, namespace: str, release: Callable[..., None], tmp_path: Path
) -> None:
    _job(control_plane, namespace, finalizers=["streamrl.io/cleanup", "example.com/other"])
    release("--set", f"watchNamespaces={{{namespace}}}")
    with _uninstalling(control_plane, namespace) as process:
        pod = _hook_pod(control_plane, namespace)
        done = _run_hook(control_plane, namespace, pod, tmp_path / "account")
        assert done.returncode == 0, done.stderr
        assert f"cleared the finalizer of rljobs {namespace}/sums" in done.stdout
        assert control_plane.get("deployment", "rl-streamrl", "-n", namespace)["spec"]["replicas"] == 0
        _succeeded(control_plane, namespace, pod)
        output, _ = process.communicate(timeout=HOOK_S)
        assert process.returncode == 0, output
    wait_until(lambda: not _found(control_plane, namespace), what="everything of the release gone", deadline_s=HOOK_S)
    job = control_plane.get("rljob", "sums", "--namespace", namespace)
    assert job["metadata"]["finalizers"] == ["example.com/other"]


def test_uninstall_deletes_jobs_where_asked_to(
    control_plane: Cluster, namespace: str, release: Callable[..., None], tmp_path: Path
) -> None:
    _job(control_plane, namespace, finalizers=[])
    release("--set", f"watchNamespaces={{{namespace}}},uninstall.jobs=Delete")
    with _uninstalling(control_plane, namespace):
        done = _run_hook(control_plane, namespace, _hook_pod(control_plane, namespace), tmp_path / "account")
    assert done.returncode == 0, done.stderr
    assert f"deleting {namespace}/sums" in done.stdout
    assert not control_plane.get("rljobs", "--namespace", namespace)["items"]


def test_a_deletion_that_hangs_is_told(
    control_plane: Cluster, namespace: str, release: Callable[..., None], tmp_path: Path
) -> None:
    _job(control_plane, namespace, finalizers=["example.com/other"])
    release("--set", f"watchNamespaces={{{namespace}}},uninstall.jobs=Delete,uninstall.timeoutSeconds=10")
    with _uninstalling(control_plane, namespace):
        done = _run_hook(control_plane, namespace, _hook_pod(control_plane, namespace), tmp_path / "account")
    assert done.returncode == 1
    assert f"gave up waiting for the operator to clear away {namespace}/sums" in done.stderr
    control_plane.kubectl(
        "patch", "rljob", "sums", "-n", namespace, "--type=merge", "-p", '{"metadata":{"finalizers":null}}'
    )


def test_uninstall_is_refused_while_a_job_has_not_ended(
    control_plane: Cluster, namespace: str, release: Callable[..., None], tmp_path: Path
) -> None:
    _job(control_plane, namespace, finalizers=[])
    release("--set", f"watchNamespaces={{{namespace}}},uninstall.jobs=Refuse")
    with _uninstalling(control_plane, namespace):
        pod = _hook_pod(control_plane, namespace)
        refused = _run_hook(control_plane, namespace, pod, tmp_path / "account")
        assert refused.returncode == 1
        assert f"not uninstalled: these RLJobs have not ended: {namespace}/sums" in refused.stderr
        assert control_plane.get("deployment", "rl-streamrl", "-n", namespace)["spec"]["replicas"] == 1
        _job(control_plane, namespace, finalizers=[], ended=True)
        agreed = _run_hook(control_plane, namespace, pod, tmp_path / "again")
        assert agreed.returncode == 0, agreed.stderr


# ---- helm test


class _Page(BaseHTTPRequestHandler):
    """The operator's page: not ready at first, or for ever."""

    def do_GET(self) -> None:
        answers: list[tuple[int, str]] = self.server.answers  # type: ignore[attr-defined]
        status, text = answers.pop(0) if len(answers) > 1 else answers[0]
        self.send_response(status if self.path == "/readyz" else 404)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


UNLED = (503, "nobody leads: get leases: 403 Forbidden\n")


@pytest.mark.parametrize(
    ("answers", "output", "error"),
    [
        ([UNLED, (200, "ok\n")], "the operator is ready, and one leads\n", ""),
        ([UNLED], "", "says: nobody leads: get leases: 403 Forbidden; the log of the operator's pods tells more"),
    ],
    ids=["ready", "nobody leads"],
)
def test_helm_test_asks_api_server_and_operator(
    control_plane: Cluster,
    helm: Helm,
    namespace: str,
    tmp_path: Path,
    answers: list[tuple[int, str]],
    output: str,
    error: str,
) -> None:
    text = helm(
        "template", "rl", str(CHART), "--kube-version", "1.34", "--show-only", "templates/tests/installed.yaml"
    ).stdout
    assert "READY_S = 60.0" in text
    pod = YAML(typ="safe").load(text.replace("READY_S = 60.0", "READY_S = 3.0"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    server.answers = list(answers)  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever, name="operator's page")
    thread.start()
    try:
        (url,) = pod["spec"]["containers"][0]["env"]
        url["value"] = f"http://127.0.0.1:{server.server_port}{urlsplit(url['value']).path}"
        done = _run_hook(control_plane, namespace, pod, tmp_path / "account")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert done.stdout == f"the API server serves RLJobs and GeneratorPools\n{output}", done.stderr
    assert error in done.stderr
    assert bool(done.returncode) is bool(error)


# ---- RBAC


def _can(control_plane: Cluster, who: str, verb: str, resource: str, *where: str, name: str = "") -> bool:
    """Ask the API server; `resource` may have a subresource: `pods/log`."""
    kind, _, part = resource.partition("/")
    what = (f"{kind}/{name}" if name else kind, *([f"--subresource={part}"] if part else []))
    done = control_plane.kubectl("auth", "can-i", verb, *what, "--as", who, *where, check=False)
    assert done.stdout.strip() in ("yes", "no"), done.stderr
    return done.stdout.strip() == "yes"


def _wait_allowed(control_plane: Cluster, who: str, verb: str, resource: str, *where: str, name: str = "") -> None:
    """An API server knows new rules a moment later."""
    wait_until(
        lambda: _can(control_plane, who, verb, resource, *where, name=name),
        what=f"{who} to be allowed to {verb} {resource}",
        deadline_s=HOOK_S,
    )


MAY = [
    ("patch", "rljobs.streamrl.io"),
    ("patch", "rljobs.streamrl.io/status"),
    ("create", "generatorpools.streamrl.io"),
    ("watch", "statefulsets.apps"),
    ("create", "secrets"),
    ("create", "pods"),  # for dry runs
    ("delete", "pods"),
    ("create", "events.events.k8s.io"),
]
MAY_NOT = [
    ("create", "rljobs.streamrl.io"),
    ("create", "pods/exec"),
    ("get", "pods/log"),
    ("deletecollection", "secrets"),
    ("create", "roles.rbac.authorization.k8s.io"),
    ("create", "serviceaccounts/token"),
    ("list", "nodes"),
    ("get", "services/proxy"),
    ("get", "customresourcedefinitions.apiextensions.k8s.io"),
]


def test_rules_of_a_list_of_namespaces(control_plane: Cluster, namespace: str, release: Callable[..., None]) -> None:
    release("--set", f"watchNamespaces={{{namespace}}}")
    who = f"system:serviceaccount:{namespace}:rl-streamrl"
    for verb, resource in MAY:
        _wait_allowed(control_plane, who, verb, resource, "--namespace", namespace)
        assert not _can(control_plane, who, verb, resource, "--namespace", "default"), (verb, resource)
    for verb, resource in MAY_NOT:
        assert not _can(control_plane, who, verb, resource, "--namespace", namespace), (verb, resource)
    lease = "leases.coordination.k8s.io"
    _wait_allowed(control_plane, who, "create", lease, "--namespace", namespace)
    _wait_allowed(control_plane, who, "update", lease, "--namespace", namespace, name="streamrl-operator")
    assert not _can(control_plane, who, "update", lease, "--namespace", namespace, name="another")


def test_rules_of_all_namespaces(control_plane: Cluster, namespace: str, release: Callable[..., None]) -> None:
    release()
    who = f"system:serviceaccount:{namespace}:rl-streamrl"
    for verb, resource in MAY:
        _wait_allowed(control_plane, who, verb, resource, "--all-namespaces")
    for verb, resource in MAY_NOT:
        assert not _can(control_plane, who, verb, resource, "--all-namespaces"), (verb, resource)
    assert not _can(control_plane, who, "update", "leases.coordination.k8s.io", "--namespace", "kube-system")


def test_people_with_edit_make_jobs_and_scale_pools(
    control_plane: Cluster, namespace: str, release: Callable[..., None]
) -> None:
    release()
    for role in ("view", "edit"):
        name = f"{namespace}-{role}"
        control_plane.kubectl("create", "rolebinding", name, "-n", namespace, f"--clusterrole={role}", f"--user={name}")
    view, edit = f"{namespace}-view", f"{namespace}-edit"
    here = ("--namespace", namespace)
    _wait_allowed(control_plane, edit, "create", "rljobs.streamrl.io", *here)  # our roles are aggregated into these two
    _wait_allowed(control_plane, view, "watch", "rljobs.streamrl.io", *here)
    assert _can(control_plane, edit, "patch", "generatorpools.streamrl.io/scale", *here)
    assert not _can(control_plane, edit, "patch", "generatorpools.streamrl.io", *here)
    assert not _can(control_plane, edit, "patch", "rljobs.streamrl.io/status", *here)
    assert not _can(control_plane, view, "create", "rljobs.streamrl.io", *here)
