"""An operator with a Role in each namespace of a list: one that is lost, or was never there, is no matter of the others."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster import rights
from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator
from streamrl import keys
from support.dashboards import OPERATOR_JOB
from support.jobs import simulated_job
from support.prometheus import chart_rules, scraping

pytestmark = pytest.mark.timeout(600)

DELETED_S = 240.0
"""The controller manager deletes a namespace in rounds, with pauses that grow."""

JOB = simulated_job()["metadata"]["name"]


@pytest.fixture
def labs(own_control_plane: ControlPlane, namespace: str) -> Iterator[tuple[Lab, Lab, Lab]]:
    """Three namespaces; the first is the operator's own."""
    api, names = own_control_plane.api, [namespace, f"{namespace}-b", f"{namespace}-c"]
    with ExitStack() as ends:
        for name in names[1:]:
            api.create("/api/v1/namespaces", {"metadata": {"name": name}}).expect()
            ends.callback(api.delete, f"/api/v1/namespaces/{name}")
        first, second, third = (Lab(own_control_plane, name) for name in names)
        yield first, second, third


@pytest.fixture
def operator(own_control_plane: ControlPlane, labs: tuple[Lab, Lab, Lab]) -> Iterator[Operator]:
    """It watches all three, and has a Role in the first and the third."""
    names = [lab.namespace for lab in labs]
    user = f"confined-{names[0]}"
    rights.grant(own_control_plane.api, user, home=names[0], namespaces=(names[0], names[2]))
    watched = {keys.ENV_NAMESPACES: ",".join(names)}
    made = Operator(own_control_plane, names[0], user=user, **watched).start()
    yield made.wait_until_leading()
    if made.runs:
        assert made.stop() == 0, made.tail()


def seen(operator: Operator, lab: Lab) -> Callable[[], bool]:
    """Whether the operator says that it follows the namespace."""
    line = f'streamrl_operator_namespace_seen{{watched="{lab.namespace}"}} 1.0'
    return lambda: line in operator.page("metrics")[1]


def looked_at(lab: Lab) -> Callable[[], bool]:
    """Whether its job was."""
    return lambda: bool(lab.condition(JOB, "Ready"))


def suspended(lab: Lab) -> Callable[[], bool]:
    return lambda: lab.condition(JOB, "Suspended").get("status") == "True"


def test_each_namespace_is_by_itself(
    labs: tuple[Lab, Lab, Lab], operator: Operator, own_control_plane: ControlPlane
) -> None:
    api, user, (first, without, third) = own_control_plane.api, operator.user, labs
    for lab in labs:
        lab.create("rljobs", simulated_job())
    for lab in (first, third):
        lab.wait(looked_at(lab), "a job where there is a Role", operator)
    assert not looked_at(without)()
    assert [seen(operator, lab)() for lab in labs] == [True, False, True]

    rights.grant(api, user, home=first.namespace, namespaces=(without.namespace,))
    without.wait(looked_at(without), "the job where there is a Role now", operator)
    assert seen(operator, without)()

    rights.revoke(api, user, namespace=without.namespace)
    without.patch("rljobs", JOB, {"spec": {"suspend": True}})
    without.wait(lambda: not seen(operator, without)(), "the loss to be noticed", operator)
    operator.stop()
    operator.start().wait_until_leading()
    first.patch("rljobs", JOB, {"spec": {"suspend": True}})
    first.wait(suspended(first), "the others to go on after a restart", operator)
    assert not suspended(without)()

    rights.grant(api, user, home=first.namespace, namespaces=(without.namespace,))
    without.wait(suspended(without), "what was asked for meanwhile", operator)
    losses = [line for line in operator.log.read_text().splitlines() if "namespace is left alone" in line]
    assert len(losses) == 3  # told once each: at the start, when the Role went, after the restart


def test_a_namespace_that_is_refused_is_an_alert_until_it_has_its_role(
    labs: tuple[Lab, Lab, Lab], operator: Operator, own_control_plane: ControlPlane, tmp_path: Path
) -> None:
    first, without, _ = labs
    targets, rules = {OPERATOR_JOB: [f"127.0.0.1:{operator.port}"]}, chart_rules(operator_job=OPERATOR_JOB)
    with scraping(targets, folder=tmp_path, rules=rules) as watching:
        watching.wait_firing("StreamRLNamespaceNotSeen", "StreamRLCacheStale")
        rights.grant(own_control_plane.api, operator.user, home=first.namespace, namespaces=(without.namespace,))
        watching.wait_silent("StreamRLNamespaceNotSeen", "StreamRLCacheStale")


def test_a_namespace_that_is_deleted_with_its_job(
    labs: tuple[Lab, Lab, Lab], operator: Operator, own_control_plane: ControlPlane
) -> None:
    """The Role may go before the job does; then docs/upgrade.md frees it."""
    first, _, third = labs
    for lab in (first, third):
        lab.create("rljobs", simulated_job())
        lab.wait(looked_at(lab), "a job where there is a Role", operator)
    own_control_plane.api.delete(f"/api/v1/namespaces/{third.namespace}").expect()
    third.wait(lambda: not third.list("rolebindings"), "the binding to be deleted", operator, deadline_s=DELETED_S)
    where = ("--namespace", third.namespace)

    def is_gone() -> bool:
        for name in own_control_plane.kubectl("get", "rljobs", *where, "--output", "name").stdout.split():
            nothing = '{"metadata":{"finalizers":null}}'
            own_control_plane.kubectl("patch", name, *where, "--type=merge", "--patch", nothing, check=False)
        return own_control_plane.api.get(f"/api/v1/namespaces/{third.namespace}").code == 404

    third.wait(is_gone, "the namespace to be gone", operator, deadline_s=DELETED_S)
    operator.stop()
    operator.start().wait_until_leading()
    first.patch("rljobs", JOB, {"spec": {"suspend": True}})
    first.wait(suspended(first), "the others to go on after a restart", operator)
    assert not seen(operator, third)()


def test_with_a_cluster_role_a_deleted_namespace_goes_by_itself(
    labs: tuple[Lab, Lab, Lab], own_control_plane: ControlPlane
) -> None:
    home, other, _ = labs
    watched = {keys.ENV_NAMESPACES: f"{home.namespace},{other.namespace}"}
    operator = Operator(own_control_plane, home.namespace, **watched).start().wait_until_leading()
    other.create("rljobs", simulated_job())
    other.wait(looked_at(other), "the job", operator)
    path = f"/api/v1/namespaces/{other.namespace}"
    own_control_plane.api.delete(path).expect()
    gone = "the namespace to be gone"
    other.wait(lambda: own_control_plane.api.get(path).code == 404, gone, operator, deadline_s=DELETED_S)
    assert operator.stop() == 0
