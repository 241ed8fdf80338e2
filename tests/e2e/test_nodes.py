"""A trainer of two nodes: ranks in two pods train one model, with NetworkPolicies enforced; the loss of one is counted once."""

import pytest

from cluster.operators import Operator
from e2e.jobs import chain_sum, chain_sum_code
from e2e.release import kill_container
from e2e.stage import Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(2400)]

JOB, STEPS, RUN_S = "chain-sum", 12, 900.0


def test_two_nodes_train_one_model(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    job = chain_sum(steps=STEPS, evaluate_every=STEPS)
    job["spec"]["trainer"]["nodes"] = 2
    job["spec"]["storage"]["checkpoints"]["intervalSteps"] = 2
    stage.apply(chain_sum_code(stage.namespace), job)
    stage.wait_step(JOB, 3, deadline_s=RUN_S)
    worker = f"{names.trainer_workers(JOB)}-0"
    assert {worker, f"{names.trainer(JOB)}-0"} <= set(stage.pods(JOB))
    claim = stage.must("persistentvolumeclaims", names.checkpoints_claim(JOB))
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    kill_container(stage.nodes, stage.pods(JOB)[worker], names.CONTAINER_TRAINER)
    status = stage.wait_succeeded(JOB, deadline_s=RUN_S)
    assert (status["step"], status["restarts"]) == (STEPS, 1), f"the rank that was killed, once\n{operator.tail()}"
    stage.assert_exact(JOB)
