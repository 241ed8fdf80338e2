"""What simulations are for: dispatch policies and pool sizes, compared with the real decisions."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from streamrl_cli.simulation.results import SimulationResult, SizeChange
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.simulation.world import simulate

Make = Callable[..., Scenario]
CURVE = [{"batch": 1, "milliseconds": 8}, {"batch": 16, "milliseconds": 10}]
MEASURED = [{"batch": 1, "milliseconds": 8.3}, {"batch": 16, "milliseconds": 9.4}, {"batch": 64, "milliseconds": 11.7}]
"""Of a 7B model."""


def late_makespan_s(outcome: SimulationResult) -> float:
    """Mean over the second half of the run: by then the scheduler knows its prompts."""
    rows = outcome.steps[len(outcome.steps) // 2 :]
    return sum(row.makespan_s for row in rows) / len(rows)


def skewed(make: Make, *, dispatch: str, **more: Any) -> SimulationResult:
    return simulate(
        make(
            pipeline={"batchGroups": 64, "steps": 20},
            scheduling={"dispatch": {dispatch: {}}},
            pool={"slots": 8, "latency": CURVE, "scaling": {"static": {"replicas": 2}}},
            lengths={
                "logNormal": {"medianTokens": 500, "sigma": 1.0},
                "withinGroupPercent": 10,
                "promptsPerEpoch": 128,
            },
            trainer={"secondsPerToken": 0, "secondsPerStep": 1},
            **more,
        )
    )


def test_longest_first_beats_the_order_of_planning_once_prompts_come_round_again(make: Make) -> None:
    fifo, late = skewed(make, dispatch="fifo"), skewed(make, dispatch="longestFirst")
    assert not late.steps[2].trusted
    assert late.steps[-1].trusted
    assert [row.makespan_s for row in late.steps[:3]] == pytest.approx([row.makespan_s for row in fifo.steps[:3]])
    assert late_makespan_s(late) < 0.95 * late_makespan_s(fifo)


def test_an_inverted_ranker_is_not_believed(make: Make) -> None:
    never_again = {"lengths": {"logNormal": {"medianTokens": 500, "sigma": 1.0}, "withinGroupPercent": 10}}
    changes = {"ranker": {"inverted": True}, "scheduling": {"lengthSignals": []}}
    outcome = simulate(
        make(
            pipeline={"batchGroups": 64, "steps": 8},
            pool={"slots": 8, "latency": CURVE, "scaling": {"static": {"replicas": 2}}},
            **never_again,
            **changes,
        )
    )
    assert not any(row.trusted for row in outcome.steps)


def elastic(make: Make, *, growth: list[tuple[int, float]], initial: int) -> list[SizeChange]:
    """Sizes of a pool whose work per step follows `growth`; training takes 60 s whatever comes."""
    outcome = simulate(
        make(
            groupSize=4,
            pipeline={"mode": "StreamAsync", "batchGroups": 16, "steps": 40},
            pool={
                "slots": 16,
                "latency": CURVE,
                "startSeconds": 10,
                "scaling": {"auto": {"initialReplicas": initial, "maxReplicas": 6, "cooldownSeconds": 120}},
            },
            lengths={
                "logNormal": {"medianTokens": 1000, "sigma": 0.3},
                "growth": [{"step": step, "factor": factor} for step, factor in growth],
            },
            trainer={"secondsPerToken": 0, "secondsPerStep": 60},
        )
    )
    return outcome.measures.sizes


def test_a_pool_grows_when_lengths_grow(make: Make) -> None:
    sizes = [change.replicas for change in elastic(make, growth=[(0, 1), (30, 6)], initial=1)]
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 3


def test_a_pool_shrinks_when_lengths_shrink(make: Make) -> None:
    sizes = [change.replicas for change in elastic(make, growth=[(0, 6), (25, 1)], initial=5)]
    from_the_top = sizes[sizes.index(max(sizes)) :]
    assert from_the_top == sorted(from_the_top, reverse=True)
    assert from_the_top[-1] <= 2


def test_a_pool_does_not_flap_when_lengths_oscillate(make: Make) -> None:
    growth = [(step, 2.0 if step // 3 % 2 else 3.0) for step in range(40)]
    changes = elastic(make, growth=growth, initial=2)
    times = [change.at_s for change in changes[1:]]
    assert all(later - earlier >= 120 for earlier, later in pairwise(times))
    assert len(changes) - 1 <= 4


@pytest.mark.parametrize(("mode", "most"), [("StreamSync", 1), ("StreamAsync", 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_pool_that_holds_a_whole_step_does_not_grow(make: Make, *, mode: str, most: int, seed: int) -> None:
    outcome = simulate(
        make(
            seed=seed,
            groupSize=8,
            resolutionTokens=4,
            pipeline={"mode": mode, "batchGroups": 8, "steps": 30},
            pool={
                "slots": 64,
                "latency": MEASURED,
                "startSeconds": 5,
                "scaling": {"auto": {"maxReplicas": 16, "cooldownSeconds": 20}},
            },
            lengths={"logNormal": {"medianTokens": 300, "sigma": 0.9}},
            trainer={"secondsPerToken": 2.5e-5, "secondsPerStep": 1},
        )
    )
    assert max(change.replicas for change in outcome.measures.sizes) <= most
