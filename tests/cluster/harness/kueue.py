"""Kueue's own controllers and webhooks beside a control plane, and queues for tests.

    kueue.install(plane)                 its definitions
    server = kueue.start(plane)
    kueue.queue(plane, namespace, "team", quota={"nvidia.com/gpu": "1"})

Only the version v1beta2 is installed, so nothing is ever converted. Its webhooks judge Workloads and nothing else.
"""

import base64
import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.harness import tools
from cluster.harness.control_plane import MASTERS, ControlPlane
from cluster.harness.flags import LOOPBACK
from cluster.harness.processes import Server, wait_until
from support.ports import free_port

GROUP = "/apis/kueue.x-k8s.io/v1beta2"
VERSION = "v1beta2"
READY_S = 120.0
_MODULE = "sigs.k8s.io/kueue"
_CERTIFICATES = "/etc/kueue/metrics/certs"
"""Where it insists on finding a certificate."""
_HOOKS = {"Mutating": ("mutate", ["workloads"]), "Validating": ("validate", ["workloads", "workloads/status"])}


def needed(tests: Iterable[object]) -> tuple[str, ...]:
    """The programs to be had before `tests` begin: none, where none has the fixture `queued`."""
    return ("kueue",) if any("queued" in getattr(each, "fixturenames", ()) for each in tests) else ()


def install(plane: ControlPlane) -> None:
    """Apply its definitions, as they come with the module that it is built from."""
    folder = Path(_module(), "config/components/crd/bases")
    yaml = YAML(typ="safe", pure=False)
    plurals = set()
    for file in sorted(folder.glob("*.yaml")):
        body = yaml.load(file.read_text())
        body["spec"]["versions"] = [
            one | {"storage": True} for one in body["spec"]["versions"] if one["name"] == VERSION
        ]
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
        plane.api.patch(path, body, kind="apply", fieldManager="streamrl-tests", force="true").expect()
        plurals.add(body["spec"]["names"]["plural"])
    wait_until(lambda: plurals <= _served(plane), what=f"{GROUP} to be served", deadline_s=READY_S)


def _served(plane: ControlPlane) -> set[str]:
    """What the API server lists: Kueue looks there once, when it starts."""
    return {one["name"] for one in plane.api.get(GROUP).body.get("resources", ())}


def _module() -> str:
    listed = subprocess.run(
        ("go", "list", "-m", "-json", _MODULE), cwd=tools.GO / "kueue", capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(listed.stdout)
    return found["Dir"]


def start(plane: ControlPlane, *, feature_gates: str = "", **configuration: Any) -> Server:
    """Start it; ends with the control plane. `configuration`: parts of its Configuration."""
    folder = plane.folder / "kueue"
    folder.mkdir(exist_ok=True)
    cert, key = plane.issue("kueue", "kueue", hosts=(LOOPBACK,))
    for source, target in ((cert, "tls.crt"), (key, "tls.key")):
        (folder / target).write_bytes(source.read_bytes())
    hooks, health = free_port(), free_port()
    config = folder / "config.json"
    config.write_text(json.dumps(_configuration(folder, hooks=hooks, health=health) | configuration))
    program = tools.tool("kueue")
    gates = ",".join(("VisibilityOnDemand=false", *([feature_gates] if feature_gates else [])))
    user = plane.kubeconfig_for("kueue", (MASTERS,))
    begin = f"mount -t tmpfs tmpfs /etc && mkdir -p {_CERTIFICATES} && cp {folder}/tls.* {_CERTIFICATES}"
    run = f"exec {program} --config={config} --kubeconfig={user} --feature-gates={gates} --zap-log-level=3"
    alone = ("unshare", "--mount", *(["--map-root-user"] if os.geteuid() else []), "sh", "-c", f"{begin} && {run}")
    server = Server("kueue", alone, log=plane.folder / "kueue.log", mark=plane.mark)
    server.start()
    _judge(plane, port=hooks)
    server.wait(lambda: _judges(plane), deadline_s=READY_S)
    return server


def _configuration(folder: Path, *, hooks: int, health: int) -> dict[str, Any]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": "default",
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": LOOPBACK, "port": hooks, "certDir": str(folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
    }


def _judge(plane: ControlPlane, *, port: int) -> None:
    """Let its webhooks judge Workloads; they are reached by address, since nothing serves here behind a Service."""
    authority = plane.files.authority.cert.read_bytes()
    for kind, (verb, resources) in _HOOKS.items():
        operations = ["CREATE"] if verb == "mutate" else ["CREATE", "UPDATE"]
        rule = {"apiGroups": ["kueue.x-k8s.io"], "apiVersions": [VERSION], "resources": resources}
        hook = {
            "name": f"{verb}.kueue.test",
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "clientConfig": {
                "url": f"https://{LOOPBACK}:{port}/{verb}-kueue-x-k8s-io-{VERSION}-workload",
                "caBundle": base64.b64encode(authority).decode(),
            },
            "rules": [rule | {"operations": operations}],
        }
        about = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": f"{kind}WebhookConfiguration"}
        path = f"/apis/admissionregistration.k8s.io/v1/{kind.lower()}webhookconfigurations/kueue"
        body = about | {"metadata": {"name": "kueue"}, "webhooks": [hook]}
        plane.api.patch(path, body, kind="apply", fieldManager="streamrl-tests", force="true").expect()


def _judges(plane: ControlPlane) -> bool:
    """Whether a Workload that asks for `pods` is refused, which only the webhook does."""
    container = {"name": "c", "image": "i", "resources": {"requests": {"pods": "1"}}}
    pod_set = {"name": "main", "count": 1, "template": {"spec": {"containers": [container]}}}
    body = _object("Workload", "trial", spec={"podSets": [pod_set]})
    answer = plane.api.create(f"{GROUP}/namespaces/default/workloads", body, dryRun="All")
    return not answer.ok and "reserved for internal kueue use" in answer.message


def _object(kind: str, name: str, **parts: Any) -> dict[str, Any]:
    return {"apiVersion": f"kueue.x-k8s.io/{VERSION}", "kind": kind, "metadata": {"name": name}, **parts}


def flavor(plane: ControlPlane, name: str, **spec: Any) -> None:
    """Make a ResourceFlavor: `nodeLabels`, `tolerations`."""
    plane.api.create(f"{GROUP}/resourceflavors", _object("ResourceFlavor", name, spec=spec)).expect()


def queue(
    plane: ControlPlane, namespace: str, name: str, *, flavor: str, quota: Mapping[str, str], **spec: Any
) -> None:
    """Make a LocalQueue, and a ClusterQueue of its own with so much of each resource. `spec`: of the ClusterQueue."""
    resources = [{"name": resource, "nominalQuota": most} for resource, most in quota.items()]
    group = {"coveredResources": list(quota), "flavors": [{"name": flavor, "resources": resources}]}
    cluster_queue = f"{namespace}-{name}"
    body = _object("ClusterQueue", cluster_queue, spec={"namespaceSelector": {}, "resourceGroups": [group]} | spec)
    plane.api.create(f"{GROUP}/clusterqueues", body).expect()
    local = _object("LocalQueue", name, spec={"clusterQueue": cluster_queue})
    plane.api.create(f"{GROUP}/namespaces/{namespace}/localqueues", local).expect()


def make(plane: ControlPlane, plural: str, kind: str, name: str, **spec: Any) -> None:
    """Make an object without a namespace."""
    plane.api.create(f"{GROUP}/{plural}", _object(kind, name, spec=spec)).expect()


def priority(plane: ControlPlane, name: str, value: int) -> None:
    """Make a WorkloadPriorityClass."""
    plane.api.create(f"{GROUP}/workloadpriorityclasses", _object("WorkloadPriorityClass", name, value=value)).expect()
