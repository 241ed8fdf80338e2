"""Policies by their orders, and what a job may ask of them; Algorithm 2 by hand; length history and seeds."""

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl.spec.scheduling import Dispatch, SkewAware
from streamrl_workers.scheduler.dispatch import POLICIES, model, policy
from streamrl_workers.scheduler.dispatch.length_pools import algorithm_2, percentile, pool_seconds
from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first, list_seconds
from streamrl_workers.scheduler.dispatch.model import MakespanModel
from streamrl_workers.scheduler.dispatch.order import IN_ORDER, LONGEST_FIRST, Candidate, Order, PlannedBatch, in_order
from streamrl_workers.scheduler.lengths import LengthHistory, prompt_key
from streamrl_workers.scheduler.sample import sample_seed

MOST_MODELLED = 50_000
"""Samples over all that an order models: a microsecond each at most."""
LENGTHS = [20.0, 5.0, 60.0, 10.0, 60.0]
EVEN = [1000.0 + place for place in range(63)]
STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 40)])
FLAT = LatencyCurve.of_milliseconds([(1, 8), (64, 9)])
CURVE = LatencyCurve.of_milliseconds([(1, 10), (2, 12), (4, 20)])


def batch(lengths: list[float], fleet: list[Instance], *, batch_groups: int = 64, **changes: object) -> PlannedBatch:
    groups = [
        Candidate(group_id=number, batch=number // batch_groups, place=number % batch_groups, predicted_tokens=tokens)
        for number, tokens in enumerate(lengths)
    ]
    return replace(PlannedBatch(trusted=True, groups=groups, instances=fleet), **changes)


def instances(count: int, *, slots: int = 8, curve: LatencyCurve = STEEP) -> list[Instance]:
    return [Instance(generator_id=f"g{number}", slots=slots, curve=curve) for number in range(count)]


def seconds(order: Order, found: PlannedBatch) -> float:
    return fmean(MakespanModel(found).seconds(order))


def sequence(key: str, lengths: list[float]) -> list[int]:
    found = batch(lengths, instances(2, slots=1), batch_groups=3)
    order = policy(key).order(found)
    return [candidate.group_id for candidate in sorted(found.groups, key=order.key)]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("fifo", [0, 1, 2, 3, 4]),
        ("longestFirst", [2, 0, 1, 4, 3]),  # longest first within each batch of three
        ("skewAware", [2, 0, 1, 4, 3]),
    ],
)
def test_order(key, expected):
    assert sequence(key, LENGTHS) == expected


@pytest.mark.parametrize("key", POLICIES)
@pytest.mark.parametrize("unknown", [{"trusted": False}, {"measured": False}], ids=str)
def test_without_trust_or_measured_speeds_every_policy_is_fifo(key, unknown):
    found = batch([20_000.0, *EVEN], instances(4, slots=4), **unknown)
    order = policy(key).order(found)
    assert [order.key(group) for group in found.groups] == [IN_ORDER.key(group) for group in found.groups]
    assert not order.long_generators


@pytest.mark.parametrize("key", POLICIES)
def test_without_predictions_the_order_is_that_of_planning(key):
    assert sequence(key, [0.0] * 5) == [0, 1, 2, 3, 4]


def test_where_all_find_a_slot_nothing_is_begun_first():
    """It would only put the longest of all together on one generator."""
    found = batch(LENGTHS, instances(2, slots=3))
    assert policy("longestFirst").order(found) == in_order("there are slots for all samples")


def test_an_order_that_is_slower_is_not_taken():
    """90 of the second batch begins when the first is through: at 25 instead of 20."""
    found = batch([5.0, 20.0, 50.0, 90.0, 20.0], instances(2, slots=1), batch_groups=3)
    assert seconds(LONGEST_FIRST, found) > seconds(IN_ORDER, found)
    assert policy("longestFirst").order(found) == in_order("longest first would not be faster")


def test_where_a_batch_follows_an_early_end_is_worth_more():
    """Alone, the one that is begun last runs fast, as others have ended; not where the next batch takes their places."""
    curve = LatencyCurve((1, 2), (0.5, 0.9))
    found = batch([8.0, 8.0, 8.0, 20.0], [Instance(generator_id="a", slots=2, curve=curve)])
    alone, followed = (
        seconds(IN_ORDER, one) - seconds(LONGEST_FIRST, one) for one in (found, replace(found, overlaps=True))
    )
    assert 0 < alone < followed / 5


@pytest.mark.parametrize("changes", [{}, {"overlaps": True}, {"begun": True}], ids=str)
def test_auto_makes_pools_for_a_batch_that_has_the_generators_for_itself(changes):
    order = policy("auto").order(batch([20_000.0, *EVEN], instances(4, slots=64), **changes))
    assert bool(order.long_generators) is not bool(changes)


@pytest.mark.parametrize(
    ("lengths", "fleet", "expected"),
    [
        ([*EVEN[:4], 9000.0, *EVEN[4:7]], instances(1, slots=2), "longest predicted first"),  # requests queue
        ([20_000.0] * 2 + EVEN, instances(4, slots=16), "length pools"),  # the longest are better off with few others
        (EVEN * 4, instances(4, slots=16, curve=FLAT), "longest predicted first"),
        ([20_000.0, *EVEN], instances(4, slots=64), "length pools"),  # nothing queues, and it pays
        ([20_000.0, *EVEN], instances(4, slots=64, curve=FLAT), "in the order of planning"),
        ([1.0], [], "in the order of planning"),
        ([], instances(2), "in the order of planning"),
    ],
)
def test_auto_takes_what_pays(lengths, fleet, expected):
    assert expected in policy("auto").order(batch(lengths, fleet)).why


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 20_000).map(float), min_size=1, max_size=40),
    st.lists(
        st.tuples(st.sampled_from([STEEP, FLAT, STEEP.scaled(2)]), st.sampled_from([2, 4, 16])),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_auto_is_never_worse_than_fifo_by_the_model(lengths, fleet, samples):
    kinds = enumerate(fleet)
    made = [Instance(generator_id=f"g{number}", slots=slots, curve=curve) for number, (curve, slots) in kinds]
    found = batch(lengths, fastest_first(made), samples=samples)
    assert seconds(policy("auto").order(found), found) <= seconds(IN_ORDER, found) * (1 + 1e-9)


@pytest.mark.parametrize(("groups", "generators"), [(1024, 32), (10_000, 1000), (65_536, 1000)])
def test_a_search_is_bounded(groups, generators, monkeypatch):
    """The scheduler answers nobody meanwhile."""
    modelled = []
    seconds_of = list_seconds
    monkeypatch.setattr(
        model, "list_seconds", lambda found, *args, **kw: modelled.append(len(found)) or seconds_of(found, *args, **kw)
    )
    lengths = [1000.0 + number for number in range(groups)]
    policy("auto").order(batch(lengths, instances(generators, slots=80), batch_groups=groups))
    assert sum(modelled) <= MOST_MODELLED


# ---- Algorithm 2


def test_the_split_of_four():
    """2 long samples of 900, 8 short ones of 500, 4 instances.

    1 | 3   long 12 ms x 900 = 10.8   short, 3 each: 16 ms x 500 = 8.0
    2 | 2   long 10 ms x 900 =  9.0   short, 4 each: 20 ms x 500 = 10.0   least
    3 | 1   long 10 ms x 900 =  9.0   short, 8 on one: 20 ms x 500 x 2 = 20.0
    """
    found = batch([500.0] * 8 + [900.0] * 2, instances(4, slots=4, curve=CURVE))
    assert algorithm_2(found, long_percent=20) == (2, 2)


@pytest.mark.parametrize(
    ("kinds", "samples", "expected"),
    [
        ({(CURVE, 4): 1}, 8, 2 * 0.020 * 100),  # two rounds
        ({(CURVE, 4): 1}, 5, 2 * 0.020 * 100),  # a started round counts whole
        ({(CURVE, 4): 2}, 2, 0.010 * 100),
        ({(CURVE, 4): 0, (CURVE, 2): 1}, 2, 0.012 * 100),
        # 200 and 100 tokens/s: 4 and 2 samples, one full round and half of one
        ({(CURVE, 4): 1, (CURVE.scaled(2), 4): 1}, 6, max(0.020, 0.024) * 100),
    ],
)
def test_a_pool_by_equation_2(kinds, samples, expected):
    assert pool_seconds(Counter(kinds), samples=samples, tokens=100) == pytest.approx(expected)


@pytest.mark.parametrize(("groups", "percent", "long"), [(10, 20, 2), (2, 20, 1), (3, 50, 2), (1024, 20, 205)])
def test_the_long_are_some_and_never_all(groups, percent, long):
    assert algorithm_2(batch([5.0] * groups, instances(2)), long_percent=percent)[0] == long


def test_percentiles_are_values_that_exist():
    assert [percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], percent) for percent in (10, 50, 90, 100)] == [1, 5, 9, 10]
    assert percentile([7], 90) == 7


def test_pools_name_groups_and_generators():
    lengths = [300.0, 1000.0, 100.0, 500.0, 900.0, 200.0, 400.0, 600.0, 700.0, 800.0]
    found = batch(lengths, instances(4, slots=4, curve=CURVE))
    order = policy("skewAware").order(found)
    assert order.long_generators == {"g0", "g1"}
    assert [group.group_id for group in found.groups if order.is_long(group)] == [1, 4]
    assert order.reorders


def test_of_equal_predictions_the_first_planned_are_the_long_ones_of_every_batch():
    order = policy("skewAware").order(batch([5.0] * 10, instances(4)))
    later = [Candidate(group_id=40 + place, batch=4, place=place, predicted_tokens=5.0) for place in range(10)]
    assert [candidate.place for candidate in later if order.is_long(candidate)] == [0, 1]


@pytest.mark.parametrize(("groups", "generators"), [(1, 4), (10, 1), (0, 4), (10, 0)])
def test_there_are_not_always_two_pools(groups, generators):
    assert not policy("skewAware").order(batch([5.0] * groups, instances(generators))).long_generators


def test_searched_pools_are_no_slower_than_those_of_algorithm_2_by_the_model():
    found = batch([9000.0] * 3 + [float(100 + 7 * place) for place in range(40)], instances(6, slots=4))
    paper, searched = (policy("skewAware", SkewAware(split=split)).order(found) for split in ("Algorithm2", "Searched"))
    assert seconds(searched, found) <= seconds(paper, found)


# ---- the registry


def test_registry_and_contract_agree():
    assert (*POLICIES, "python") == Dispatch.choices()


def test_options_are_those_of_the_job():
    asked = Dispatch.model_validate({"skewAware": {"longPercent": 50}})
    found = batch([float(place) for place in range(10)], instances(4))
    long = [group for group in found.groups if policy(asked.key, asked.value).order(found).is_long(group)]
    assert len(long) == 5


def test_unknown_policy_names_the_known():
    with pytest.raises(ValueError, match="unknown dispatch policy 'random'; known: fifo, longestFirst, skewAware"):
        policy("random")


def test_history_knows_the_moving_mean_of_a_prompt():
    history = LengthHistory()
    assert history.known(1) is None
    history.learn(1, mean_tokens=10.0)
    history.learn(1, mean_tokens=20.0)
    history.learn(2, mean_tokens=45.0)
    assert history.known(1) == 15.0
    assert history.known(3) is None


def test_history_forgets_what_was_not_seen_for_long():
    history = LengthHistory({1: 1.0, 2: 2.0}, max_prompts=2)
    history.learn(1, mean_tokens=1.0)
    history.learn(3, mean_tokens=3.0)
    assert history.means() == {1: 1.0, 3: 3.0}


def test_prompt_key_is_stable_and_fits_63_bits():
    assert prompt_key("2 + 2 =") == prompt_key("2 + 2 =") != prompt_key("2 + 3 =")
    assert 0 < prompt_key("") < 1 << 63


def test_seeds_are_fixed_and_differ():
    seeds = {sample_seed(1, group_id=group, sample_index=index) for group in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert sample_seed(1, group_id=2, sample_index=3) == sample_seed(1, group_id=2, sample_index=3)
    assert sample_seed(0, group_id=0, sample_index=0) == 2558736989570252433
