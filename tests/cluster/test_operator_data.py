"""A job whose data has changed, on a real control plane: held until the data is back, or until a field allows it."""

import json
from typing import Any

import pytest

from cluster.operators import Lab, Operator
from cluster.test_operator_ends import JOB, sizes, start
from cluster.test_operator_unread import running
from streamrl import keys, names
from streamrl.errors import EXIT_DATA_CHANGED

pytestmark = pytest.mark.timeout(300)

LINE = "spec.task.dataset: the data has changed since the journal was written; recorded: 180 rows; now: 181 rows"


def tell(lab: Lab, *, waits: bool) -> None:
    """As a kubelet does while the scheduler finds other data at each start, and once it is at work."""
    ended = {"terminated": {"exitCode": EXIT_DATA_CHANGED, "reason": "Error", "message": LINE}}
    state = {"waiting": {"reason": "CrashLoopBackOff"}} if waits else {"running": {}}
    scheduler = running("scheduler") | {"state": state, "lastState": ended, "ready": not waits, "restartCount": 4}
    status: dict[str, Any] = {"phase": "Running", "initContainerStatuses": [scheduler]}
    lab.patch("pods", f"{JOB}-trainer-0", {"status": status}, part="status")


def test_a_job_is_held_while_its_data_has_changed(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    wanted = sorted(sizes(lab))
    lab.wait(lambda: lab.get("pods", f"{JOB}-trainer-0") is not None, "the trainer's pod", operator)
    tell(lab, waits=True)
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "DataChanged", "the condition", operator)
    lab.wait(lambda: sum(sizes(lab)) == 1, "the trainer's pod alone", operator)
    assert lab.condition(JOB, "Ready")["message"] == LINE
    assert lab.condition(JOB, "Failed")["status"] == "False"
    tell(lab, waits=False)
    lab.wait(lambda: sorted(sizes(lab)) == wanted, "the generators", operator)
    assert lab.must("rljobs", JOB)["status"].get("restarts", 0) == 0
    change = {"spec": {"suspend": True, "task": {"allowChangedData": True}}}
    lab.patch("rljobs", JOB, change)

    def allowed() -> bool:
        document = json.loads(lab.must("configmaps", names.resolved(JOB))["data"][keys.FILE_JOB])
        return bool(document["spec"]["task"]["allowChangedData"])

    lab.wait(allowed, "job.json", operator)
