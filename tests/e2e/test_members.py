"""A job with its trainer in one real cluster and its generators in another, over a link that is the only way between them."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.harness.two_clusters import TwoClusters
from cluster.members import Pair, operator_with_members, wait_gone
from cluster.operators import Operator
from e2e.conftest import a_stage
from e2e.jobs import simulated
from e2e.stage import RUN_S, Stage

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 10


@pytest.fixture
def joined(two_clusters: TwoClusters) -> Iterator[tuple[Stage, Pair, Operator]]:
    """A namespace of the hub, its place in the member, and an operator in the hub's network."""
    with a_stage(two_clusters.hub, "two") as stage:
        pair = Pair.of(stage, two_clusters.member)
        operator = operator_with_members(two_clusters.hub, stage.namespace).start().wait_until_leading()
        text = two_clusters.seen_from_hub(pair.kubeconfig).read_text()
        pair.join(text=text, exposure={"nodePort": {"host": two_clusters.hub.addresses.wan}})
        pair.wait_connected(operator)
        yield stage, pair, operator
        stage.close()
        pair.leave()
        operator.stop()


def far_away(pair: Pair) -> dict[str, Any]:
    """A job of simulated engines whose generators are all in the member: without them there is no step."""
    job = simulated("far", steps=STEPS, replicas=2)
    job["spec"]["generators"] = [{**pool, "clusterName": pair.name} for pool in job["spec"]["generators"]]
    return job


def test_a_job_whose_generators_are_all_in_a_member_runs_to_its_end_and_leaves_nothing_there(
    joined: tuple[Stage, Pair, Operator],
) -> None:
    stage, pair, operator = joined
    stage.apply(far_away(pair))
    status = stage.wait_succeeded("far", deadline_s=2 * RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 0), operator.tail()
    assert f"checkpoint step-{STEPS:08d}" in stage.assert_exact("far")
    stage.delete("rljobs", "far")
    stage.wait(lambda: stage.get("rljobs", "far") is None, "the job to go", operator, deadline_s=RUN_S)
    wait_gone(pair.there, "far", operator)
