"""Fixtures of a cluster with a real node (level 2), on which pods run.

Needs root and a few Debian packages; where they are missing tests are skipped with the list, or fail where
STREAMRL_REQUIRE has `cluster`. Logs of failed tests: in the folder that STREAMRL_CLUSTER_LOGS names, else in pytest's.
"""

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from cluster.harness import images, kueue, leftovers, pods, tools
from cluster.harness.base import GIVEN
from cluster.harness.cluster import NodeCluster
from cluster.harness.containers import missing_packages
from cluster.harness.node import Node
from cluster.harness.processes import ClusterError
from cluster.harness.two_clusters import TwoClusters

RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
LONGEST_NAMESPACE = 40
MARK = "node"
"""On every test that needs a node."""
LACK = pytest.StashKey[str]()


def absent(reason: str) -> NoReturn:
    """Fail where a cluster is required, else skip, with the reason."""
    if "cluster" in os.environ.get("STREAMRL_REQUIRE", "").split(","):
        pytest.fail(f"STREAMRL_REQUIRE has `cluster`: {reason}", pytrace=False)
    pytest.skip(reason)


def prepare(session: pytest.Session) -> None:
    """Build programs and images before the first test that needs a node: a build takes longer than any test may."""
    users = [item for item in session.items if item.get_closest_marker(MARK)]
    if session.config.option.collectonly or not users:
        return
    try:
        session.config.stash[LACK] = lack() or ""
        if not session.config.stash[LACK]:
            tools.build(2)
            for name in kueue.needed(users):
                tools.tool(name)
            for image in (images.pause(), images.coredns(), images.worker_test()):
                images.archive(image)
    except (tools.ToolError, ClusterError) as error:
        session.config.stash[LACK] = str(error)


def lack() -> str | None:
    """Why this machine cannot have a node of our own."""
    if os.environ.get(GIVEN):
        return f"needs a node of our own, whose parts it may stop; {GIVEN} names another's cluster"
    if os.geteuid() != 0:
        return "a node needs root"
    if lacking := missing_packages():
        return f"a node needs more of this machine: apt-get install {' '.join(lacking)}"
    return None


@pytest.fixture(scope="session")
def node_possible(pytestconfig: pytest.Config) -> None:
    """Skip or fail where this machine cannot have a node."""
    if reason := pytestconfig.stash.get(LACK, ""):
        absent(reason)


@pytest.fixture(scope="session")
def node_cluster(node_possible: None) -> Iterator[NodeCluster]:
    """A control plane and a node, with our CRDs and the image `WORKER_IMAGE`."""
    with NodeCluster() as cluster:
        cluster.apply_crds()
        cluster.load("worker-test")
        yield cluster


@pytest.fixture
def node(
    node_cluster: NodeCluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    """The node; when the test failed, everything that explains it is written into a folder."""
    with _kept_logs(request, tmp_path_factory, node_cluster):
        yield node_cluster.the_node


@contextlib.contextmanager
def _kept_logs(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, *clusters: NodeCluster
) -> Iterator[None]:
    """Where a test failed in the block, write what explains it into a folder."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        kept = os.environ.get("STREAMRL_CLUSTER_LOGS")
        folder = Path(kept) / request.node.name if kept else factory.mktemp("cluster-logs")
        for number, cluster in enumerate(clusters):
            sys.stderr.write(f"logs of the cluster: {cluster.collect_logs(folder / str(number))}\n")


@pytest.fixture(scope="session")
def linked_clusters(node_possible: None) -> Iterator[TwoClusters]:
    """A hub with our CRDs, a member without, a WAN between them; `two_clusters` is for tests. Nothing is left of them."""
    with TwoClusters() as two:
        yield two
        places = [cluster.the_node.place for cluster in (two.hub, two.member)]
    assert [leftovers.wait_gone(*place) for place in places] == [{}, {}]


@pytest.fixture
def two_clusters(
    linked_clusters: TwoClusters, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoClusters]:
    """`.hub`, `.member`, `.link` (cut, slow, lossy, heal, shape), `.seen_from_hub(kubeconfig)`; the link is healed afterwards."""
    with _kept_logs(request, tmp_path_factory, linked_clusters.hub, linked_clusters.member):
        yield linked_clusters
    linked_clusters.link.heal()


@pytest.fixture
def node_namespace(node: Node, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of the test's own on the cluster with a node, with Pod Security `restricted`."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))[:LONGEST_NAMESPACE].strip("-")
    name = f"{stem}-{secrets.token_hex(3)}"
    pods.make_namespace(node.objects, name, RESTRICTED)
    yield name
    node.objects.delete(f"/api/v1/namespaces/{name}")
