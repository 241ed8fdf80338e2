"""A real control plane for the tests below this folder, and a namespace for each test.

Not in the default suite: `make test-cluster`. STREAMRL_TEST_KUBECONFIG names a cluster to use instead;
STREAMRL_REQUIRE=cluster turns "cannot be had here, skipped" into a failure.
"""

import os
import re
import secrets
from collections.abc import Iterator
from typing import NoReturn

import pytest

from cluster.command_fixtures import cli, job_file, patch  # noqa: F401 - fixtures
from cluster.harness import kueue, tools
from cluster.harness.base import GIVEN, Cluster
from cluster.harness.control_plane import ControlPlane, open_cluster
from cluster.harness.processes import wait_until
from cluster.node_fixtures import (  # noqa: F401 - fixtures
    linked_clusters,
    node,
    node_cluster,
    node_namespace,
    node_possible,
    prepare,
    two_clusters,
)
from cluster.operators import Lab, Operator, refused

LONGEST_STEM = 40
ACCOUNT_S = 120.0
OURS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm", "prometheus")
LACK = pytest.StashKey[str]()


def absent(reason: str) -> NoReturn:
    """Fail where a cluster is required, else skip, with the reason."""
    if "cluster" in os.environ.get("STREAMRL_REQUIRE", "").split(","):
        pytest.fail(f"STREAMRL_REQUIRE has `cluster`: {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test: a build takes longer than any test may."""
    prepare(session)
    users = [item for item in session.items if "control_plane" in getattr(item, "fixturenames", ())]
    if session.config.option.collectonly or not users:
        return
    try:
        of_gitops = ("gitops",) if any("gitops" in item.fixturenames for item in users) else ()
        for name in (*(("kubectl",) if os.environ.get(GIVEN) else (*OURS, *kueue.needed(users))), *of_gitops):
            tools.tool(name)
    except tools.ToolError as error:
        session.config.stash[LACK] = str(error)


@pytest.fixture(scope="session")
def control_plane(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """A control plane with our CRDs: no node, so no pod ever runs. Ours, or the one that was given."""
    if lack := pytestconfig.stash.get(LACK, ""):
        absent(lack)
    with open_cluster() as cluster:
        cluster.apply_crds()
        yield cluster


@pytest.fixture(scope="session")
def own_control_plane(control_plane: Cluster) -> ControlPlane:
    """The control plane, where a test needs ours: faults, audit log, users by certificate."""
    if not isinstance(control_plane, ControlPlane):
        absent(f"needs a control plane that it may stop; {GIVEN} names another's")
    return control_plane


@pytest.fixture
def namespace(control_plane: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own, ready for pods; deleted at its end, without waiting."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))[:LONGEST_STEM].strip("-")
    name = f"{stem}-{secrets.token_hex(3)}"
    path = f"/api/v1/namespaces/{name}"
    control_plane.api.create("/api/v1/namespaces", {"metadata": {"name": name}}).expect()
    wait_until(
        lambda: control_plane.api.get(f"{path}/serviceaccounts/default").ok,
        what=f"the default service account of {name}",
        deadline_s=ACCOUNT_S,
    )
    yield name
    control_plane.api.delete(path)


@pytest.fixture(scope="module")
def own_member() -> Iterator[ControlPlane]:
    """A control plane without our CRDs; a module may stop it."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def lab(own_control_plane: ControlPlane, namespace: str) -> Lab:
    """What a test asks of the operator's namespace."""
    return Lab(own_control_plane, namespace)


@pytest.fixture
def operator(own_control_plane: ControlPlane, namespace: str) -> Iterator[Operator]:
    """An operator that looks after the test's namespace, is refused nothing, and ends in order."""
    made = Operator(own_control_plane, namespace).start()
    yield made.wait_until_leading()
    if made.runs:
        assert made.stop() == 0, made.tail()
    assert refused(own_control_plane, namespace) == set(), "asked for, and not granted by the chart (_rbac.tpl)"
