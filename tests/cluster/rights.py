"""What the chart lets the operator do, granted to a user of a test cluster: its rules as helm renders them, and no others.

Rendered, not read from a snapshot: it takes a fraction of a second once a process, helm is built with all else that a control plane needs,
and whoever changes `_rbac.tpl` and runs one test sees what that does.
"""

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.harness.api import Api
from cluster.harness.processes import wait_until
from support.chart import CHART, runner

_GROUP = "/apis/rbac.authorization.k8s.io/v1"
_KNOWN_S = 120.0
"""For the API server's own caches to know of a grant."""


def grant(api: Api, user: str, *, home: str, namespaces: Sequence[str] = (), **values: str) -> None:
    """As an installation in namespace `home` (empty: in any) grants it to the operator; `namespaces`: the chart's watchNamespaces.

    `values`: more of the chart's, by path with `__` for the dots. The tests' operators run outside of the cluster.
    """
    given = {"numbers": "Proxy", **values}
    rules, leader = _rules(tuple(f"{name.replace('__', '.')}={value}" for name, value in given.items()))
    _bind(api, user, "leader", leader, namespace=home)
    _wait(api, user, home, group="coordination.k8s.io", resource="leases", verb="create")
    for namespace in namespaces or ("",):
        _bind(api, user, "operator", rules, namespace=namespace)
        _wait(api, user, namespace, group="streamrl.io", resource="rljobs", verb="list")


def revoke(api: Api, user: str, *, namespace: str) -> None:
    """Take away what is granted in a namespace, the Lease aside."""
    api.delete(_path("rolebindings", f"{user}-operator", namespace)).expect()
    _wait(api, user, namespace, group="streamrl.io", resource="rljobs", verb="list", allowed=False)


@cache
def _rules(values: tuple[str, ...]) -> tuple[list[Any], list[Any]]:
    """The operator's rules where jobs are, and those for its Lease."""
    chart = ["streamrl", str(CHART), "--kube-version", "1.34", "--show-only", "templates/rbac/operator.yaml"]
    chart += [part for value in values for part in ("--set", value)]
    with tempfile.TemporaryDirectory(prefix="streamrl-helm-") as home:
        text = runner(Path(home))("template", *chart).stdout
    found = {one["kind"]: one["rules"] for one in YAML(typ="safe").load_all(text) if one and "rules" in one}
    return found["ClusterRole"], found["Role"]


def _bind(api: Api, user: str, what: str, rules: list[Any], *, namespace: str) -> None:
    prefix, name = ("" if namespace else "Cluster"), f"{user}-{what}"
    subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{prefix}Role", "name": name}
    for kind, body in (("Role", {"rules": rules}), ("RoleBinding", {"roleRef": reference, "subjects": [subject]})):
        about = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": prefix + kind, "metadata": {"name": name}}
        path = _path(f"{prefix}{kind}s".lower(), name, namespace)
        api.patch(path, about | body, kind="apply", fieldManager="streamrl-tests", force="true").expect()


def _path(plural: str, name: str, namespace: str) -> str:
    return f"{_GROUP}/namespaces/{namespace}/{plural}/{name}" if namespace else f"{_GROUP}/{plural}/{name}"


def _wait(api: Api, user: str, namespace: str, *, allowed: bool = True, **what: str) -> None:
    review = {"user": user, "resourceAttributes": {"namespace": namespace, **what}}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": review}
    wait_until(
        lambda: (
            api.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", body).expect()["status"]["allowed"]
            is allowed
        ),
        what=f"the API server to {'grant' if allowed else 'refuse'} {what} to {user} in {namespace or 'all namespaces'}",
        deadline_s=_KNOWN_S,
    )
