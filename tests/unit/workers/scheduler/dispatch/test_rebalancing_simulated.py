"""Rebalancing in virtual time, with the real core: a pair of runs that differ in nothing but the moves."""

from typing import Any

import pytest

from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import SimulationResult, summary
from streamrl_cli.simulation.world import simulate

STEEP = [{"batch": 1, "milliseconds": 16}, {"batch": 4, "milliseconds": 18}, {"batch": 16, "milliseconds": 40}]
FLAT = [{"batch": 1, "milliseconds": 5}]


def scenario(**changes: Any) -> dict[str, Any]:
    """A slow pool and a fast one; FIFO fills both, and the fast one is done long before."""
    pools = [
        {"name": name, "scaling": {"static": {"replicas": 2}}, "slots": 16, "latency": latency}
        for name, latency in (("slow", STEEP), ("fast", FLAT))
    ]
    return {
        "groupSize": 4,
        "maxTokens": 8192,
        "resolutionTokens": 16,
        "partialProgress": True,
        "pipeline": {"mode": "StreamSync", "maxStalenessSteps": 0, "batchGroups": 16, "steps": 4},
        "scheduling": {"dispatch": {"fifo": {}}},
        "pools": pools,
        "lengths": {"logNormal": {"medianTokens": 2000, "sigma": 0.9}, "withinGroupPercent": 50, "promptsPerEpoch": 32},
        **changes,
    }


def run(found: dict[str, Any], **rebalance: Any) -> SimulationResult:
    scheduling = found["scheduling"] | ({"rebalance": rebalance} if rebalance else {})
    return simulate(parse_scenario(found | {"scheduling": scheduling}))


def test_an_idle_fast_pool_takes_the_tail_of_a_slow_one() -> None:
    without, moves = run(scenario()), run(scenario(), gainPercent=5)
    assert moves.moved_samples > 0
    assert moves.steps[0].at_s == without.steps[0].at_s, "lengths and speeds are not known yet"
    assert moves.trained_s < 0.9 * without.trained_s
    assert (
        [row.summary.stats.samples for row in moves.steps]
        == [row.summary.stats.samples for row in without.steps]
        == [64] * 4
    )
    assert sum(row.tokens for row in moves.steps) == sum(row.tokens for row in without.steps)
    assert summary(moves)["lost_samples"] == summary(moves)["reissued_samples"] == 0
    assert summary(moves)["moved_samples"] == moves.moved_samples


@pytest.mark.parametrize(
    "pools",
    [
        [{"name": "p", "scaling": {"static": {"replicas": 4}}, "slots": 16, "latency": FLAT}],
        [{"name": "p", "scaling": {"static": {"replicas": 1}}, "slots": 16, "latency": STEEP}],
    ],
    ids=["flat curves", "one generator"],
)
def test_where_there_is_nothing_to_gain_nothing_moves(pools: list[dict[str, Any]]) -> None:
    without, moves = run(scenario(pools=pools)), run(scenario(pools=pools), gainPercent=5)
    assert moves.moved_samples == 0
    assert moves.trained_s == without.trained_s


def test_kills_and_moves_together_lose_nothing() -> None:
    events = [
        {"atSeconds": at_s, "kill": {"generator": f"generator-{pool}-0"}}
        for at_s, pool in ((90, "slow"), (210, "fast"), (285, "slow"), (330, "fast"))
    ]
    outcome = run(scenario(events=events), gainPercent=1)
    assert outcome.moved_samples > 0
    assert summary(outcome)["reissued_samples"] > 0
    consumed = [group for groups in outcome.measures.compositions.values() for group in groups]
    assert len(consumed) == len(set(consumed)) == 64
