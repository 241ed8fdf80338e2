"""A cluster with a real node, an operator, a namespace for each test. Not in the default suite: `make e2e`, `make e2e-faults`.

Two operators: `host_operator` is a process of this machine that looks after one namespace; `release` is the chart, installed by
helm, whose operator runs as a pod of its own image.
"""

import contextlib
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.harness import images, pods
from cluster.harness.cluster import NodeCluster
from cluster.harness.node import Node
from cluster.harness.processes import ClusterError
from cluster.harness.two_clusters import TwoClusters
from cluster.members import Pair, operator_with_members
from cluster.node_fixtures import (  # noqa: F401 - fixtures
    LACK,
    RESTRICTED,
    linked_clusters,
    node,
    node_cluster,
    node_possible,
    prepare,
    two_clusters,
)
from cluster.operators import Operator
from e2e.jobs import prompts
from e2e.release import Release
from e2e.stage import Stage


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test: a build takes longer than any test may."""
    prepare(session)
    users = [item for item in session.items if "release" in getattr(item, "fixturenames", ())]
    if users and not session.config.option.collectonly and not session.config.stash.get(LACK, ""):
        try:
            images.archive(images.of_repository("operator"))
        except ClusterError as error:
            session.config.stash[LACK] = str(error)


@contextlib.contextmanager
def a_stage(cluster: NodeCluster, name: str) -> Iterator[Stage]:
    """A namespace with Pod Security `restricted` and the data set of simulated jobs."""
    namespace = f"{name}-{secrets.token_hex(3)}"
    pods.make_namespace(cluster.the_node.objects, namespace, RESTRICTED)
    stage = Stage(cluster, namespace)
    stage.apply(prompts(namespace))
    yield stage
    stage.close()
    cluster.the_node.objects.delete(f"/api/v1/namespaces/{namespace}")


@contextlib.contextmanager
def in_both(two: TwoClusters) -> Iterator[tuple[Stage, Pair, Operator]]:
    """A namespace of the hub, its place in the member, and an operator in the hub's network."""
    with a_stage(two.hub, "two") as stage:
        pair = Pair.of(stage, two.member, trainers=True)
        operator = operator_with_members(two.hub, stage.namespace).start().wait_until_leading()
        text = two.seen_from_hub(pair.kubeconfig).read_text()
        ways = [{"nodePort": {"host": cluster.addresses.wan}} for cluster in (two.hub, two.member)]
        pair.join(text=text, exposure=ways[0], trainers={"exposure": ways[1]})
        pair.wait_connected(operator)
        try:
            yield stage, pair, operator
        finally:
            stage.close()
            pair.leave()
            operator.stop()


@pytest.fixture
def watched(node_cluster: NodeCluster, node: Node) -> Iterator[tuple[Stage, Operator]]:  # noqa: F811 - a fixture
    """A namespace and the operator of this machine that looks after it, and after nothing else."""
    with Release.absent(node_cluster), a_stage(node_cluster, "watched") as stage:
        operator = Operator(node_cluster, stage.namespace).start().wait_until_leading()
        yield stage, operator
        if not operator.runs:  # a test has ended it: jobs go only with an operator
            operator.start()
        stage.close()
        operator.stop()


@pytest.fixture(scope="session")
def release(node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:  # noqa: F811
    """The chart, installed by helm; its operator is a pod and looks after all namespaces."""
    made = Release(node_cluster, home=tmp_path_factory.mktemp("helm"))
    made.install()
    yield made
    sys.stderr.write(f"operator in the cluster: {made.figures()}\n")


@pytest.fixture
def stage(release: Release, node: Node) -> Iterator[Stage]:  # noqa: F811 - a fixture
    """A namespace that the release's operator looks after."""
    with a_stage(release.cluster, "e2e") as made:
        yield made


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder of the test's own."""
    return tmp_path
