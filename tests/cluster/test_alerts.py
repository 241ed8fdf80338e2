"""Alerts about operators: what they warn of is made to happen to a real one, a real Prometheus says that they fire, and that they clear.

The chart's rules with shorter windows (`support.prometheus.faster`). A namespace that is refused: `test_operator_namespaces.py`; jobs in runs:
tests/chart; a job above its maxCost, whose numbers a scheduler in a pod tells: tests/e2e.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster.harness.control_plane import ControlPlane
from cluster.operators import Lab, Operator
from cluster.test_operator_unread import make_ready, running
from streamrl import keys, names
from support import dashboards
from support.dashboards import ONLY_WHEN, OPERATOR_JOB
from support.jobs import simulated_job
from support.prometheus import Prometheus, chart_rules, scraping
from support.runs import wait_for

pytestmark = pytest.mark.timeout(900)

JOB = simulated_job()["metadata"]["name"]
LEAF_LIFE_S = 30
"""Of certificates: renewed at two thirds, and overdue at three quarters."""
LEASE_S = 30
"""Of a holder that is gone: long enough for the alert, and then the operator takes the Lease."""
NO_NODE = {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU"}]}
ENDED = {"exitCode": 1, "reason": "Error", "startedAt": "2026-01-01T12:00:00Z", "finishedAt": "2026-01-01T12:01:00Z"}
RESTARTED = {
    "phase": "Running",
    "containerStatuses": [
        running("generator") | {"ready": False, "restartCount": 1, "lastState": {"terminated": ENDED}},
    ],
}
"""Of two generators, each once."""
MICROSECONDS = "%Y-%m-%dT%H:%M:%S.%fZ"


@pytest.fixture
def watching(operator: Operator, tmp_path: Path) -> Iterator[Prometheus]:
    rules = chart_rules(operator_job=OPERATOR_JOB)
    with scraping({OPERATOR_JOB: [f"127.0.0.1:{operator.port}"]}, folder=tmp_path, rules=rules) as made:
        yield made


def test_an_operator_that_is_down(watching: Prometheus, operator: Operator) -> None:
    watching.wait_silent("StreamRLOperatorDown")
    assert operator.stop() == 0
    watching.wait_firing("StreamRLOperatorDown")
    operator.start().wait_until_leading()
    watching.wait_silent("StreamRLOperatorDown")


def test_operators_that_nobody_leads(watching: Prometheus, operator: Operator, lab: Lab) -> None:
    """Somebody else took the Lease and is gone; once its time is over the operator takes it."""
    assert operator.stop() == 0
    (lease,) = lab.list("leases")
    moment = datetime.now(UTC).strftime(MICROSECONDS)
    taken = {"holderIdentity": "gone", "leaseDurationSeconds": LEASE_S, "renewTime": moment}
    lab.patch("leases", lease["metadata"]["name"], {"spec": taken})
    operator.start()
    watching.wait_firing("StreamRLOperatorWithoutLeader")
    operator.wait_until_leading()
    watching.wait_silent("StreamRLOperatorWithoutLeader")


def test_reconciles_that_fail(watching: Prometheus, operator: Operator, lab: Lab, namespace: str) -> None:
    """An object that a job needs is somebody else's. What reads the errors has data then, and only then."""
    theirs = names.resolved(JOB)
    lab.create("configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": theirs}})
    lab.create("rljobs", simulated_job())
    watching.wait_firing("StreamRLReconcilesFail")
    variables = {"operator": OPERATOR_JOB, "namespace": namespace, "job": JOB, "pool": "sim"}
    metric = "streamrl_operator_reconcile_errors_total"
    assert metric in ONLY_WHEN
    asked = [one for one in dashboards.panel_queries(variables) if metric in one.expr]
    assert asked
    assert [str(one) for one in asked if not watching.has_data(one.expr)] == [], operator.tail()
    lab.delete("configmaps", theirs)
    lab.patch("rljobs", JOB, {"spec": {"activeDeadlineSeconds": 3600}})  # a new wish ends the pause
    watching.wait_silent("StreamRLReconcilesFail")


def test_numbers_that_cannot_be_read(watching: Prometheus, operator: Operator, lab: Lab) -> None:
    lab.create("rljobs", simulated_job())
    lab.wait(lambda: len(lab.list("pods")) == 3, "the pods", operator)
    make_ready(lab)
    watching.wait_firing("StreamRLNumbersUnreachable")
    lab.delete("rljobs", JOB)
    watching.wait_silent("StreamRLNumbersUnreachable")


@pytest.fixture
def with_short_certificates(own_control_plane: ControlPlane, namespace: str) -> Iterator[Operator]:
    made = Operator(own_control_plane, namespace, **{keys.ENV_LEAF_LIFE_SECONDS: str(LEAF_LIFE_S)}).start()
    yield made.wait_until_leading()
    assert made.stop() == 0, made.tail()


def test_jobs_that_wait_restart_and_fail(with_short_certificates: Operator, lab: Lab, tmp_path: Path) -> None:
    """One job finds no node, its generators restart, no trainer comes, and then a certificate cannot be renewed; another job fails."""
    operator, rules = with_short_certificates, chart_rules(operator_job=OPERATOR_JOB)
    first = ("StreamRLJobRestarts", "StreamRLJobFailed", "StreamRLJobUnschedulable")
    later = ("StreamRLTrainerNeverStarted", "StreamRLCertificateEnds")
    with scraping({OPERATOR_JOB: [f"127.0.0.1:{operator.port}"]}, folder=tmp_path, rules=rules) as watching:
        lab.create("rljobs", simulated_job())
        lab.wait(lambda: len(lab.list("pods")) == 3, "the pods", operator)
        wait_for(lambda: watching.has_data("streamrl_job_restarts"), what="a scrape before the restarts")
        watching.wait_silent(*first, *later)
        for pod in lab.list("pods"):
            status = RESTARTED if pod["metadata"]["labels"][names.LABEL_ROLE] == "generator" else NO_NODE
            lab.patch("pods", pod["metadata"]["name"], {"status": status}, part="status")
        other = simulated_job()
        other["metadata"]["name"] = "other"
        lab.create("rljobs", other)
        lab.patch("rljobs", "other", {"spec": {"activeDeadlineSeconds": 1}})
        for name in first:  # restarts fire for a shortened hour alone
            watching.wait_firing(name)
        secret = names.tls_secret(JOB, "trainer")
        lab.patch("secrets", secret, {"immutable": True})
        watching.wait_firing(*later)
        lab.delete("secrets", secret)
        watching.wait_silent("StreamRLCertificateEnds")
        for name in (JOB, "other"):
            lab.delete("rljobs", name)
        watching.wait_silent(*first, *later)
