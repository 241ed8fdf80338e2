"""Whole runs in virtual time: exact times of tiny ones, and what must hold in every one."""

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.latency import LatencyCurve, replica_seconds
from streamrl_cli.reporting.chrome_trace import ChromeTrace
from streamrl_cli.simulation.results import SimulationResult, summary
from streamrl_cli.simulation.scenario import Scenario
from streamrl_cli.simulation.world import simulate

Make = Callable[..., Scenario]
CURVE = LatencyCurve((1, 2), (0.01, 0.02))


def walls(outcome: SimulationResult, kind: str) -> dict[str, float]:
    return summary(outcome)["seconds"][kind]


def check(outcome: SimulationResult) -> None:
    """Every step once, every group once, nobody too old, all parts add up."""
    pipeline = outcome.scenario.pipeline
    compositions = outcome.measures.compositions
    assert sorted(compositions) == list(range(pipeline.steps))
    groups = [group for taken in compositions.values() for group in taken]
    assert len(groups) == len(set(groups)) == pipeline.steps * pipeline.batch_groups
    assert max(row.summary.staleness_max for row in outcome.steps) <= pipeline.staleness
    for processes in outcome.measures.walls.values():
        for wall in processes:
            assert sum(wall.parts.values()) == pytest.approx(wall.wall_s, abs=1e-6)
            assert min(wall.parts.values()) >= -1e-9


# ---- exact times


def test_one_generator_and_one_group_take_the_exact_replica_time(make: Make) -> None:
    outcome = simulate(make())
    [row] = outcome.steps
    assert row.makespan_s == pytest.approx(replica_seconds(CURVE, [10, 30]))
    assert row.makespan_s == pytest.approx(0.4)
    assert row.at_s == pytest.approx(0.4 + 40 * 0.001 + 0.5)
    assert outcome.wall_s == pytest.approx(row.at_s)


def test_the_wall_is_parted_as_the_bubbles_are_defined(make: Make) -> None:
    outcome = simulate(make(pipeline={"steps": 2}))
    step_s, pool, trainer = 0.4 + 0.54, walls(outcome, "p"), walls(outcome, "trainer")
    assert outcome.wall_s == pytest.approx(2 * step_s)
    assert pool["busy"] == pytest.approx(2 * (0.2 + 0.1))
    assert pool["skew"] == pytest.approx(2 * 0.1)  # one of two slots for 0.2 s, and nothing waits
    assert pool["pipeline_staleness"] == pytest.approx(0.54)
    assert pool["other"] == pytest.approx(0.54)  # nothing more is to be made
    assert trainer["busy"] == pytest.approx(2 * 0.54)
    assert trainer["pipeline_no_samples"] == pytest.approx(2 * 0.4)


def test_a_freed_slot_takes_the_next_sample_at_once(make: Make) -> None:
    outcome = simulate(make(pipeline={"batchGroups": 2}, lengths={"table": {"rows": [[10, 30], [20, 20]]}}))
    [row] = outcome.steps
    # fifo: 10|30 from 0; 20 from 0.2 to 0.6 beside 30; 20 beside the last none: 30 and 20 end at 0.6, the other 20 alone
    assert row.makespan_s == pytest.approx(0.6 + 20 * 0.01)


def test_training_overlaps_with_generation_where_staleness_lets_it(make: Make) -> None:
    rows = {"table": {"rows": [[20, 20]]}}
    sync = simulate(make(pipeline={"steps": 6}, lengths=rows))
    pipelined = simulate(make(pipeline={"steps": 6, "mode": "StreamAsync"}, lengths=rows))
    generate_s, train_s = 0.4, 0.54
    assert sync.trained_s == pytest.approx(6 * (generate_s + train_s))
    assert pipelined.trained_s == pytest.approx(generate_s + 6 * train_s)
    assert summary(pipelined)["staleness"] == {"0": 1, "1": 5}


def test_a_batch_may_wait_for_the_whole_batch_before(make: Make) -> None:
    rows = {"table": {"rows": [[10, 30]]}}
    changes = {"pipeline": {"steps": 6, "mode": "StreamAsync"}, "lengths": rows, "trainer": {"secondsPerToken": 0}}
    streamed = simulate(make(**changes))
    called = simulate(make(**changes, batchByBatch=True))
    check(called)
    # streamed: the slot that is free after 10 tokens takes the next batch's; else it stays empty until the 30 are done
    train_s = 0.5
    assert called.trained_s == pytest.approx(0.4 + 6 * train_s)
    assert max(row.makespan_s for row in called.steps) == pytest.approx(0.4)
    assert max(row.makespan_s for row in streamed.steps) > 0.4


def test_a_batch_that_waits_is_spread_over_all_generators(make: Make) -> None:
    rows = {"table": {"rows": [[20, 20]]}}
    two = {"pool": {"scaling": {"static": {"replicas": 2}}, "slots": 4}, "lengths": rows}
    outcome = simulate(make(pipeline={"batchGroups": 2, "steps": 3}, batchByBatch=True, **two))
    # one group on each, every time: else who loads a version first takes both
    assert [row.makespan_s for row in outcome.steps] == pytest.approx([0.4] * 3)


def test_a_sample_costs_training_time_beside_its_tokens(make: Make) -> None:
    without = simulate(make())
    costed = simulate(make(trainer={"secondsPerSample": 0.25}))
    assert costed.trained_s - without.trained_s == pytest.approx(2 * 0.25)  # a group comes whole


def test_weights_take_their_time_to_every_generator(make: Make) -> None:
    weights = {"weightBytes": 1000, "publishSeconds": 0.25}
    outcome = simulate(make(pipeline={"steps": 3}, trainer=weights, pool={"bandwidth": "500", "loadSeconds": 0.5}))
    transfer_s = 0.25 + 1000 / 500 + 0.5
    assert outcome.trained_s == pytest.approx(3 * (transfer_s + 0.4 + 0.54))
    assert walls(outcome, "p")["weights"] == pytest.approx(3 * transfer_s - 2 * 0.25)
    assert walls(outcome, "trainer")["weights"] == pytest.approx(3 * 0.25 + 0.25)


def test_links_rewards_and_the_journal_delay_what_goes_through_them(make: Make) -> None:
    outcome = simulate(make(pool={"linkSeconds": 0.1}, rewards={"seconds": 0.2}, journal={"commitSeconds": 0.05}))
    # attempt 0.05; the announcement and the load's word 0.1 each; issue 0.1, tokens, the end's word 0.1;
    # the reward 0.2; the group's record 0.05; the step; its record 0.05
    assert outcome.trained_s == pytest.approx(0.05 + 0.2 + 0.1 + 0.4 + 0.1 + 0.2 + 0.05 + 0.54 + 0.05)


def test_samples_that_end_during_a_scoring_are_scored_together_next(make: Make) -> None:
    # ends at 0.2 and 0.4; the first scoring takes until 0.7, the second one until 1.2
    outcome = simulate(make(rewards={"seconds": 0.5}))
    assert outcome.trained_s == pytest.approx(1.2 + 0.54)
    assert outcome.measures.scored == 2


def test_two_generators_share_the_work(make: Make) -> None:
    rows = {"table": {"rows": [[20, 20]]}}
    changes = {"pipeline": {"batchGroups": 2}, "lengths": rows}
    one = simulate(make(**changes))
    two = simulate(make(**changes, pool={"scaling": {"static": {"replicas": 2}}}))
    assert one.steps[0].makespan_s == pytest.approx(0.8)
    assert two.steps[0].makespan_s == pytest.approx(0.4)


# ---- what happens from outside


def test_a_killed_generator_costs_what_it_had_not_told_and_no_group(make: Make) -> None:
    rows = {"table": {"rows": [[300, 300]]}}  # 6 s
    kill = [{"atSeconds": 4.5, "kill": {"generator": "generator-p-0"}}]
    outcome = simulate(make(lengths=rows, events=kill))
    check(outcome)
    found = summary(outcome)
    assert (found["lost_samples"], found["reissued_samples"]) == (2, 2)
    # 200 tokens were told by second 4; it is back a second after its death and makes the other 100 in 2 s
    assert outcome.steps[0].makespan_s == pytest.approx(4.5 + 1 + 2)


def test_a_generator_that_leaves_finishes_first(make: Make) -> None:
    two = {"scaling": {"static": {"replicas": 2}}}
    leave = [{"atSeconds": 0.1, "leave": {"generator": "generator-p-1"}}]
    outcome = simulate(make(pool=two, events=leave, pipeline={"batchGroups": 2, "steps": 3}))
    check(outcome)
    assert summary(outcome)["reissued_samples"] == 0
    gone, stayed = sorted(wall.wall_s for wall in outcome.measures.walls["p"])
    assert gone == pytest.approx(0.4)
    assert stayed == pytest.approx(outcome.wall_s)


def test_a_trainer_that_comes_back_repeats_the_steps_behind_its_checkpoint(make: Make) -> None:
    restart = [{"atSeconds": 3.0, "restartTrainer": {"downSeconds": 5}}]  # in step 3; a step takes 0.94 s
    outcome = simulate(
        make(pipeline={"steps": 5}, events=restart, trainer={"checkpointIntervalSteps": 2, "checkpointSeconds": 0.01})
    )
    check(outcome)
    attempts = [(row.summary.attempt, row.summary.step) for row in outcome.steps]
    assert attempts == [(1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (2, 4)]
    assert walls(outcome, "trainer")["other"] == pytest.approx(5 + 3 * 0.01)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"events": [{"atSeconds": 0.1, "kill": {"generator": "generator-p-0", "returns": False}}]},
            "nothing more happens after 0.1 s in step 0 of 1; it waits for a generator: none is connected",
        ),
        (
            {"limitSeconds": 0.3},
            "limitSeconds 0.3 are over in step 0 of 1; it waits for samples under way: 1, on generators: 1",
        ),
        (
            {"events": [{"atSeconds": 0.1, "restartTrainer": {"downSeconds": 80}}], "limitSeconds": 60},
            "limitSeconds 60 are over in step 0 of 1; it waits for the trainer: it is not connected",
        ),
    ],
)
def test_a_run_that_does_not_end_says_what_it_waits_for(make: Make, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=f"^simulation: {line}$") as caught:
        simulate(make(**changes))
    assert "\n" not in str(caught.value)


# ---- in every run

POOLS = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 4),
        "scaling": st.integers(1, 3).map(lambda replicas: {"static": {"replicas": replicas}}),
        "loadSeconds": st.sampled_from([0, 0.3]),
        "linkSeconds": st.sampled_from([0, 0.02]),
        "devices": st.sampled_from(["Own", "Own", "Trainer"]),
        "kvNanoseconds": st.sampled_from([0, 10_000]),
        "bandwidth": st.sampled_from(["100", "10k"]),
    }
)
NAMES = st.integers(0, 2).map(lambda ordinal: {"generator": f"generator-p-{ordinal}"})
EVENTS = st.lists(
    st.builds(
        lambda at_s, happens: {"atSeconds": at_s, **happens},
        st.floats(0, 20),
        st.one_of(
            NAMES.map(lambda name: {"kill": name}),
            NAMES.map(lambda name: {"leave": name | {"returns": True}}),
            st.floats(0, 5).map(lambda down_s: {"restartTrainer": {"downSeconds": down_s}}),
        ),
    ),
    max_size=4,
)
MODES = [("StreamSync", 0), ("Colocated", 0), ("Batch", 1), ("StreamAsync", 1), ("StreamAsync", 2)]
PIPELINES = st.builds(
    lambda mode, groups, steps: {
        "mode": mode[0],
        "maxStalenessSteps": mode[1],
        "batchGroups": groups,
        "steps": steps,
    },
    st.sampled_from(MODES),
    st.integers(1, 4),
    st.integers(1, 6),
)
DISPATCH = ["fifo", "longestFirst", "skewAware", "auto"]
RUNS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 99),
        "pool": POOLS,
        "events": EVENTS,
        "pipeline": PIPELINES,
        "scheduling": st.sampled_from(DISPATCH).map(lambda key: {"dispatch": {key: {}}}),
        "rewards": st.sampled_from([0, 0.1]).map(lambda seconds: {"seconds": seconds}),
        "journal": st.sampled_from([0, 0.05]).map(lambda seconds: {"commitSeconds": seconds}),
        "resolutionTokens": st.sampled_from([1, 8]),
    }
)


@settings(max_examples=60)
@given(RUNS)
def test_every_run_ends_with_every_group_once_and_none_too_old(make: Make, changes: dict[str, Any]) -> None:
    lengths = {"logNormal": {"medianTokens": 60, "sigma": 0.8}, "promptsPerEpoch": 5}
    trainer = {"secondsPerStep": 0.2, "weightBytes": 100, "checkpointIntervalSteps": 2, "publishSeconds": 0.1}
    check(simulate(make(**changes, lengths=lengths, trainer=trainer)))


@pytest.mark.parametrize(("mode", "staleness"), [("StreamSync", 0), ("StreamAsync", 1), ("Batch", 1)])
def test_a_lent_pool_generates_while_the_trainer_waits_and_at_no_other_time(
    make: Make, mode: str, staleness: int
) -> None:
    changes: dict[str, Any] = {
        "pipeline": {"mode": mode, "maxStalenessSteps": staleness, "batchGroups": 8, "steps": 6},
        "lengths": {"logNormal": {"medianTokens": 60, "sigma": 0.5}},
    }
    own = make().pools[0].model_dump(mode="json", by_alias=True, exclude_none=True)
    apart, lending = (
        simulate(make(**changes, pools=pools)) for pools in ([own], [own, own | {"name": "lent", "devices": "Trainer"}])
    )
    assert lending.trained_s < apart.trained_s
    trainer, pool = walls(lending, "trainer"), walls(lending, "lent")
    waits_s = sum(seconds for part, seconds in trainer.items() if part.startswith("pipeline_"))
    assert 0 < pool["busy"] + pool["skew"] <= waits_s + 1e-6
    assert pool["pipeline_phase"] >= trainer["busy"] - 1e-6


# ---- the same again, and what a trace holds


def test_the_same_scenario_gives_the_same_numbers(make: Make) -> None:
    changes = {
        "pipeline": {"mode": "StreamAsync", "batchGroups": 4, "steps": 5},
        "lengths": {"logNormal": {"medianTokens": 100}},
        "events": [{"atSeconds": 3, "kill": {"generator": "generator-p-0"}}],
    }
    one, same, other = (json.dumps(summary(simulate(make(**changes, seed=seed)))) for seed in (5, 5, 6))
    assert one == same
    assert one != other


def test_a_coarser_resolution_keeps_the_times(make: Make) -> None:
    changes = {"pipeline": {"batchGroups": 4, "steps": 3}, "lengths": {"table": {"rows": [[640, 320], [64, 128]]}}}
    fine, coarse = (simulate(make(**changes, resolutionTokens=unit)) for unit in (1, 64))
    assert [row.at_s for row in coarse.steps] == pytest.approx([row.at_s for row in fine.steps])
    assert summary(coarse)["tokens"] == summary(fine)["tokens"]


def test_a_trace_has_every_sample_in_a_slot_of_its_own(make: Make, tmp_path: Any) -> None:
    trace, path = ChromeTrace(), tmp_path / "trace.json"
    outcome = simulate(make(pipeline={"batchGroups": 3, "steps": 2}), trace=trace)
    trace.write(path)
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert set(names.values()) == {"generator-p-0", "trainer"}
    samples = [event for event in events if event["ph"] == "X" and names[event["pid"]] == "generator-p-0"]
    assert len(samples) == 12
    assert {event["tid"] for event in samples} == {1, 2}
    assert max(event["ts"] + event["dur"] for event in samples) <= outcome.wall_s * 1e6
    for track in (1, 2):
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in samples if event["tid"] == track)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))
