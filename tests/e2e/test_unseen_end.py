"""A job's end that nobody could see when it came: the API server's proxy forbidden, the network closed to the operator, and no operator there."""

from collections.abc import Iterator

import pytest

from e2e.jobs import simulated
from e2e.release import NAME, NAMESPACE, Release, kill_container
from e2e.stage import RUN_S, Object, Stage, restarts_of
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(1200)]

JOB = "unseen"
STEPS, STEP_S = 300, 0.5
"""It still runs when the operator has said that it cannot read the numbers, and is gone."""
POLICY = f"/apis/networking.k8s.io/v1/namespaces/{NAMESPACE}/networkpolicies/{NAME}"


@pytest.fixture
def closed(release: Release) -> Iterator[None]:
    """The operator's pod reaches the API server and name servers, and no scheduler."""
    api = release.cluster.api
    egress = api.get(POLICY).expect()["spec"]["egress"]
    rest = [rule for rule in egress if names.PORT_SIGNALS not in [port["port"] for port in rule.get("ports", ())]]
    assert len(rest) == len(egress) - 1, egress
    api.patch(POLICY, {"spec": {"egress": rest}}).expect()
    release.cluster.the_node.wait_policies()
    yield
    api.patch(POLICY, {"spec": {"egress": egress}}).expect()
    release.cluster.the_node.wait_policies()


def trainer(stage: Stage) -> Object:
    return stage.pods(JOB)[f"{names.trainer(JOB)}-0"]


def idles(stage: Stage, *, restarts: int) -> bool:
    """Whether the scheduler serves again, after so many ends: only then has this life left its word."""
    (found,) = (one for one in trainer(stage)["status"]["initContainerStatuses"] if one["name"] == "scheduler")
    return restarts_of(trainer(stage))["scheduler"] == restarts and bool(found.get("started"))


@pytest.mark.usefixtures("closed")
def test_the_end_is_found_with_the_pod_when_an_operator_comes(release: Release, stage: Stage) -> None:
    asked = ("auth", "can-i", "get", "services", "--subresource", "proxy", "--namespace", stage.namespace)
    assert release.cluster.kubectl(*asked, "--as", release.account, check=False).stdout.strip() == "no"
    stage.apply(simulated(JOB, steps=STEPS, step_s=STEP_S, replicas=1))
    stage.wait_step(JOB, 1)
    unreachable = "NumbersUnreachable"
    stage.wait_for(lambda: stage.condition(JOB, "Ready").get("reason") == unreachable, unreachable, job=JOB)
    with Release.absent(release.cluster):
        assert stage.page(JOB)["step"] < STEPS, "it has ended too early for this test"
        stage.wait_for(lambda: idles(stage, restarts=1), "the last word", job=JOB, deadline_s=2 * RUN_S)
        kill_container(release.cluster, trainer(stage), names.CONTAINER_SCHEDULER)  # the pod forgets its first life
        stage.wait_for(lambda: idles(stage, restarts=2), "another life of the scheduler's container", job=JOB)
        assert "completionTime" not in stage.status(JOB)
    status = stage.wait_succeeded(JOB)
    assert (status["step"], status["restarts"]) == (STEPS, 0)
    stage.assert_exact(JOB)
