"""What a run has cost, by who was connected how long."""

import pytest

from streamrl_workers.scheduler.server.cost import (
    TRAINER_POOL,
    CostMeter,
    per_million_tokens,
    per_reward_point,
    rates,
    total,
)
from support.jobs import parsed_job

HOURLY = {TRAINER_POOL: 8.0, "a": 2.0, "b": 1.0}


def test_rates_are_those_of_the_job() -> None:
    assert rates(parsed_job().spec) == {TRAINER_POOL: 1.0, "sim": 1.0}


def test_each_look_charges_what_was_there_since_the_one_before() -> None:
    meter = CostMeter(HOURLY, spent={}, now_s=100.0)
    meter.look({"a": 2, TRAINER_POOL: 1}, now_s=1000.0)  # nobody was there until now
    assert meter.total == 0
    assert meter.per_hour == {TRAINER_POOL: 8.0, "a": 4.0, "b": 0.0}
    meter.look({"b": 1}, now_s=1000.0 + 1800)
    meter.look({"b": 1}, now_s=1000.0 + 3600)
    assert meter.spent == {TRAINER_POOL: 4.0, "a": 2.0, "b": 0.5}


def test_a_scheduler_that_starts_again_goes_on() -> None:
    meter = CostMeter(HOURLY, spent={"a": 3.0, "gone": 7.0}, now_s=0.0)
    meter.look({"a": 1}, now_s=60.0)
    meter.look({}, now_s=60.0 + 3600)
    assert meter.spent["a"] == 5.0
    assert meter.spent["gone"] == 7.0, "a pool that was taken away has cost what it has cost"


def test_cost_of_tokens() -> None:
    assert per_million_tokens(3.0, tokens=500_000) == 6.0
    assert per_million_tokens(3.0, tokens=0) is None
    assert per_million_tokens(None, tokens=1) is None


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ({"mean_reward": 0.7, "cost": {"": 12.0}}, 0.5),  # 20 points for 10
        ({"mean_reward": 0.5, "cost": {"": 12.0}}, None),
        ({"mean_reward": 0.4, "cost": {"": 12.0}}, None),
        ({"mean_reward": None, "cost": {"": 12.0}}, None),
        ({"mean_reward": 0.7}, None),
        ({}, None),
    ],
)
def test_cost_of_a_reward_point(last: dict, expected: float | None) -> None:
    found = per_reward_point({"mean_reward": 0.5, "cost": {"": 1.0, "a": 1.0}}, last)
    assert found == (None if expected is None else pytest.approx(expected))


def test_lines_of_earlier_releases_have_no_cost() -> None:
    assert total({"step": 3}) is None
    assert total({"cost": {"": 1.0, "a": 0.5}}) == 1.5
