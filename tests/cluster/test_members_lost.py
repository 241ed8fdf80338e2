"""A member that is lost and found: its API server ends, its credentials go, it is made anew; deletions meanwhile; what nobody wants any more.

There are no kubelets: pods stay pending.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.members import Pair, admit, made_there, operator_with_members, wait_gone
from cluster.operators import Lab, Operator
from cluster.test_members import JOB, LATE_S, MADE_THERE, THERE, job, start
from support.dashboards import OPERATOR_JOB
from support.prometheus import chart_rules, scraping

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def pair(lab: Lab, own_member: ControlPlane) -> Iterator[Pair]:
    """A namespace at home and one in the member, joined."""
    made = Pair.of(lab, own_member)
    made.join()
    yield made
    made.leave()


@pytest.fixture
def operator(own_control_plane: ControlPlane, namespace: str, pair: Pair) -> Iterator[Operator]:
    """An operator that follows RLClusters."""
    made = operator_with_members(own_control_plane, namespace).start()
    yield made.wait_until_leading()
    assert made.stop() == 0, made.tail()


def wait_lost(pair: Pair, operator: Operator, *, is_lost: bool = True) -> None:
    """Until the job says so."""
    wanted = "True" if is_lost else "False"
    pair.lab.wait(
        lambda: pair.lab.condition(JOB, "ClusterUnreachable").get("status") == wanted,
        f"ClusterUnreachable {wanted}",
        operator,
        deadline_s=LATE_S,
    )


def ready_of_pool(lab: Lab, name: str) -> tuple[str, str]:
    """(status, reason)."""
    conditions = lab.must("generatorpools", name).get("status", {}).get("conditions", [])
    return next(((one["status"], one["reason"]) for one in conditions if one["type"] == "Ready"), ("", ""))


def test_an_api_server_that_ends_freezes_the_pools_there_and_all_goes_on_when_it_is_back(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    start(pair, operator)
    restarts = pair.lab.must("rljobs", JOB)["status"]["restarts"]
    with own_member.without_apiserver():
        wait_lost(pair, operator)
        assert ready_of_pool(pair.lab, THERE) == ("Unknown", "ClusterUnreachable")
        assert pair.lab.must("generatorpools", THERE)["status"]["desiredReplicas"] == 2
        change = [{"op": "replace", "path": "/spec/generators/0/scaling/static/replicas", "value": 2}]
        change += [{"op": "replace", "path": "/spec/generators/1/scaling/static/replicas", "value": 3}]
        pair.lab.patch("rljobs", JOB, change, kind="json")
        pair.lab.wait(
            lambda: pair.lab.must("statefulsets", f"{JOB}-near")["spec"]["replicas"] == 2, "home goes on", operator
        )
    wait_lost(pair, operator, is_lost=False)
    pair.lab.wait(lambda: len(pair.there.list("pods")) == 3, "three pods there", operator, deadline_s=LATE_S)
    assert pair.lab.must("rljobs", JOB)["status"]["restarts"] == restarts
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator)
    wait_gone(pair.there, JOB, operator)


def test_an_alert_tells_of_a_member_that_is_lost(
    pair: Pair, operator: Operator, own_member: ControlPlane, tmp_path: Path
) -> None:
    pair.wait_connected(operator)
    rules = chart_rules(operator_job=OPERATOR_JOB)
    with scraping({OPERATOR_JOB: [f"127.0.0.1:{operator.port}"]}, folder=tmp_path, rules=rules) as watching:
        watching.wait_silent("StreamRLClusterLost")
        with own_member.without_apiserver():
            watching.wait_firing("StreamRLClusterLost")
        watching.wait_silent("StreamRLClusterLost")


def test_a_deletion_waits_for_a_member_that_is_lost(pair: Pair, operator: Operator, own_member: ControlPlane) -> None:
    start(pair, operator)
    with own_member.without_apiserver():
        pair.wait_connected(operator, "False", deadline_s=LATE_S)
        pair.lab.delete("rljobs", JOB)
        wait_lost(pair, operator)
        pair.lab.wait(lambda: pair.lab.get("statefulsets", f"{JOB}-trainer") is None, "home is clean", operator)
        pair.lab.wait(
            lambda: "streamrl.io/abandon" in pair.lab.condition(JOB, "ClusterUnreachable")["message"],
            "what the deletion waits for",
            operator,
        )
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator, deadline_s=LATE_S)
    wait_gone(pair.there, JOB, operator)


def test_what_was_given_up_is_swept_when_the_member_is_back(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    start(pair, operator)
    with own_member.without_apiserver():
        pair.wait_connected(operator, "False", deadline_s=LATE_S)
        pair.lab.delete("rljobs", JOB)
        pair.lab.patch("rljobs", JOB, {"metadata": {"annotations": {"streamrl.io/abandon": pair.name}}})
        pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator, deadline_s=LATE_S)
        assert operator.stop() == 0
        operator.start().wait_until_leading()  # which remembers nothing of the job
    pair.lab.wait(lambda: not any(made_there(pair.there, JOB).values()), "the sweep", operator, deadline_s=LATE_S)
    wait_gone(pair.there, JOB, operator)


def test_credentials_that_go_are_taken_again_when_they_are_new(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    start(pair, operator)
    config: dict[str, Any] = json.loads(pair.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "expired"
    pair.credentials(json.dumps(config))
    pair.lab.wait(
        lambda: pair.condition("Connected").get("reason") == "Unauthorized",
        "Connected False, Unauthorized",
        operator,
        deadline_s=LATE_S,
    )
    wait_lost(pair, operator)
    pair.lab.delete("secrets", pair.name)
    pair.lab.wait(
        lambda: pair.condition("Connected").get("reason") == "KubeconfigRefused",
        "KubeconfigRefused",
        operator,
        deadline_s=LATE_S,
    )
    pair.credentials(pair.kubeconfig.read_text())
    wait_lost(pair, operator, is_lost=False)
    pair.wait_connected(operator, deadline_s=LATE_S)
    assert made_there(pair.there, JOB) == MADE_THERE


def test_a_member_that_is_made_anew_is_another_cluster_and_gets_all_again(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    start(pair, operator)
    before = pair.lab.must("rljobs", JOB)["status"]["clusters"][0]["clusterUid"]
    remake(own_member)
    pair.credentials(admit(own_member, pair.there.namespace).read_text())
    pair.lab.wait(lambda: made_there(pair.there, JOB) == MADE_THERE, "all of it again", operator, deadline_s=LATE_S)
    (entry,) = pair.lab.must("rljobs", JOB)["status"]["clusters"]
    assert entry["clusterUid"] not in ("", before)
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator)
    wait_gone(pair.there, JOB, operator)


def remake(plane: ControlPlane) -> None:
    """The same addresses and authority, and nothing in it."""
    for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
        plane.servers[name].stop(kill=True)
    shutil.rmtree(plane.folder / "etcd")
    plane._start()


def test_a_cut_in_the_midst_of_making_or_removing_is_made_good(
    pair: Pair, operator: Operator, own_member: ControlPlane
) -> None:
    pair.wait_connected(operator)
    pair.lab.create("rljobs", job(pair.name))
    pair.lab.wait(lambda: bool(pair.there.get("configmaps", f"{JOB}-anchor")), "the anchor", operator)
    own_member.restart_apiserver(kill=True)
    pair.lab.wait(lambda: made_there(pair.there, JOB) == MADE_THERE, "the rest", operator, deadline_s=LATE_S)
    pair.lab.delete("rljobs", JOB)
    pair.lab.wait(lambda: pair.there.get("statefulsets", THERE) is None, "the first to go", operator, deadline_s=LATE_S)
    own_member.restart_apiserver(kill=True)
    pair.lab.wait(lambda: pair.lab.get("rljobs", JOB) is None, "the job to go", operator, deadline_s=LATE_S)
    wait_gone(pair.there, JOB, operator)
