"""A job that costs more than its maxCost: a real Prometheus that scrapes the operator says so, until the amount is raised."""

from pathlib import Path

import pytest

from cluster.operators import Operator
from e2e.jobs import simulated
from e2e.stage import Stage
from support.dashboards import OPERATOR_JOB
from support.prometheus import chart_rules, scraping

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB, ALERT = "dear", "StreamRLCostAboveMax"
SPENT, PLENTY = "0.01", "1000.00"
"""Three processes that count 1 an hour each cost a hundredth in 12 s."""


def test_a_job_above_its_max_cost_is_told_of_until_the_amount_is_raised(
    watched: tuple[Stage, Operator], tmp_path: Path
) -> None:
    stage, operator = watched
    job = simulated(JOB, steps=10_000, step_s=0.5)
    job["spec"]["maxCost"] = {"amount": PLENTY, "action": "Warn"}
    stage.apply(job)
    stage.wait_step(JOB, 1)
    page, rules = f"127.0.0.1:{operator.port}", chart_rules(operator_job=OPERATOR_JOB)
    with scraping({OPERATOR_JOB: [page]}, folder=tmp_path, rules=rules) as watching:
        watching.wait_silent(ALERT)
        stage.change(JOB, maxCost={"amount": SPENT, "action": "Warn"})
        watching.wait_firing(ALERT)
        stage.change(JOB, maxCost={"amount": PLENTY, "action": "Warn"})
        watching.wait_silent(ALERT)
    stage.wait_step(JOB, stage.page(JOB)["step"] + 1)
