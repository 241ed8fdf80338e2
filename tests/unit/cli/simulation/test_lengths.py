"""Lengths of completions: by prompt, by epoch, by step; the same for the same seed."""

from collections.abc import Callable
from statistics import correlation, median, quantiles

import pytest

from streamrl_cli.simulation.lengths import LengthModel, ModelledRanker, correlation_of, growth_at, recall_of
from streamrl_cli.simulation.scenario import GrowthPoint, Scenario, ScenarioRanker

Make = Callable[..., Scenario]
LOG_NORMAL = {"logNormal": {"medianTokens": 1000, "sigma": 0.5}}


def means(model: LengthModel, groups: range) -> list[float]:
    return [sum(model.group(group)) / len(model.group(group)) for group in groups]


def test_log_normal_lengths_have_their_median_and_spread(make: Make) -> None:
    model = LengthModel(make(lengths=LOG_NORMAL))
    drawn = [tokens for group in range(3000) for tokens in model.group(group)]
    low, middle, high = quantiles(drawn, n=4)
    assert middle == pytest.approx(1000, rel=0.05)
    assert high / low == pytest.approx(1.963, rel=0.08)  # exp(2 * 0.6745 * 0.5)


def test_lengths_by_quantiles_are_linear_between_them(make: Make) -> None:
    points = [{"percent": 0, "tokens": 100}, {"percent": 80, "tokens": 500}, {"percent": 100, "tokens": 5000}]
    model = LengthModel(make(lengths={"quantiles": {"points": points}}))
    drawn = sorted(tokens for group in range(3000) for tokens in model.group(group))
    assert drawn[0] >= 100
    assert drawn[-1] <= 5000
    assert median(drawn) == pytest.approx(350, rel=0.05)
    assert drawn[int(0.9 * len(drawn))] == pytest.approx(2750, rel=0.08)


def test_the_same_seed_gives_the_same_lengths_in_any_order(make: Make) -> None:
    one, other = LengthModel(make(lengths=LOG_NORMAL, seed=3)), LengthModel(make(lengths=LOG_NORMAL, seed=3))
    forth = [one.group(group) for group in range(50)]
    assert forth == [other.group(group) for group in reversed(range(50))][::-1]
    assert forth != [LengthModel(make(lengths=LOG_NORMAL, seed=4)).group(group) for group in range(50)]


@pytest.mark.parametrize(("drift", "least", "most"), [(0, 0.999, 1.0), (30, 0.6, 0.8), (100, -0.15, 0.15)])
def test_a_prompt_keeps_its_length_over_epochs_but_for_the_drift(
    make: Make, drift: int, least: float, most: float
) -> None:
    spec = LOG_NORMAL | {"promptsPerEpoch": 500, "withinGroupPercent": 0, "driftPercent": drift}
    model = LengthModel(make(lengths=spec))
    assert model.text_of(7) == model.text_of(507)
    assert least <= correlation(means(model, range(500)), means(model, range(500, 1000))) <= most + 1e-9


@pytest.mark.parametrize("within", [0, 100])
def test_samples_of_a_group_are_alike_as_far_as_the_spread_is_between_prompts(make: Make, within: int) -> None:
    model = LengthModel(make(lengths=LOG_NORMAL | {"withinGroupPercent": within}))
    pairs = [model.group(group) for group in range(500)]
    alike = correlation([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    assert alike == pytest.approx(0.0 if within else 1.0, abs=0.15)


def test_a_table_is_taken_as_it_is_and_comes_round(make: Make) -> None:
    model = LengthModel(make(groupSize=3, lengths={"table": {"rows": [[10, 30], [5]]}}))
    assert [model.group(group) for group in range(3)] == [(10, 30, 10), (5, 5, 5), (10, 30, 10)]
    assert [model.text_of(group) for group in range(3)] == ["prompt 0", "prompt 1", "prompt 0"]


def test_lengths_grow_with_the_step_and_end_at_the_longest(make: Make) -> None:
    growth = [{"step": 2, "factor": 1}, {"step": 4, "factor": 3}]
    table = {"table": {"rows": [[100]]}, "growth": growth}
    model = LengthModel(make(lengths=table, maxTokens=250, pipeline={"batchGroups": 2, "steps": 9}))
    assert [model.group(group)[0] for group in range(0, 12, 2)] == [100, 100, 100, 200, 250, 250]
    assert growth_at([GrowthPoint(step=1, factor=2.0)], step=0) == 2


@pytest.mark.parametrize("recall", [0.2, 0.5, 0.75, 0.87, 1.0])
def test_a_modelled_ranker_finds_the_share_of_the_longest_that_it_is_said_to(make: Make, recall: float) -> None:
    model = LengthModel(make(lengths=LOG_NORMAL | {"withinGroupPercent": 0}))
    ranker = ModelledRanker(ScenarioRanker(recallPercent=recall * 100), lengths=model, seed=1, step=lambda: 0)
    prompts = range(4000)
    longest = set(sorted(prompts, key=lambda prompt: -model.group(prompt)[0])[:800])
    predicted = sorted(prompts, key=lambda prompt: -(ranker.score(model.text_of(prompt)) or 0))[:800]
    assert len(longest.intersection(predicted)) / 800 == pytest.approx(recall, abs=0.035)
    assert recall_of(correlation_of(recall)) == pytest.approx(recall, abs=1e-3)


def test_a_ranker_that_flips_is_inverted_from_its_step_on(make: Make) -> None:
    model, now = LengthModel(make(lengths=LOG_NORMAL)), [4]
    spec = ScenarioRanker(recallPercent=100.0, flipsAtStep=5)
    ranker = ModelledRanker(spec, lengths=model, seed=1, step=lambda: now[0])
    before = [ranker.score(model.text_of(prompt)) for prompt in range(20)]
    now[0] = 5
    assert [ranker.score(model.text_of(prompt)) for prompt in range(20)] == [-(score or 0) for score in before]
