"""Queries of dashboards and alerts about operators, asked of a real Prometheus that scrapes a real operator with a job; all others: tests/chart."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.operators import Lab, Operator
from support import dashboards
from support.dashboards import OPERATOR_JOB
from support.drawn_boards import drawn
from support.jobs import simulated_job
from support.prometheus import Prometheus, scraping

pytestmark = pytest.mark.timeout(900)

JOB = "simulated"
MAX_COST = {"amount": "1000.00", "action": "Warn"}
"""Without one the condition that its alert reads is not there."""


@pytest.fixture
def scraped(operator: Operator, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that reads the operator's page, under the name that the chart's PodMonitor gives it."""
    with scraping({OPERATOR_JOB: [f"127.0.0.1:{operator.port}"]}, folder=tmp_path) as made:
        yield made


def test_every_query_and_alert_about_an_operator_has_data(
    scraped: Prometheus, operator: Operator, lab: Lab, namespace: str, tmp_path: Path
) -> None:
    job = simulated_job()
    job["spec"]["maxCost"] = MAX_COST
    lab.create("rljobs", job)
    chosen = {"operator": OPERATOR_JOB, "namespace": namespace, "job": JOB, "pool": "sim"}
    everything = dict.fromkeys(chosen, ".*")
    asked = [
        one for variables in (chosen, everything) for one in dashboards.panel_queries(variables) if one.of_operator
    ]
    told = dashboards.told(scraped, asked=asked, alerts=[one for one in dashboards.alerts() if one.of_operator])
    assert told == [], operator.tail()
    found = drawn({"streamrl-operator": chosen}, prometheus=scraped, folder=tmp_path, minutes=3)
    assert set(found) <= dashboards.panels_that_may_be_empty(lambda one: False)
