"""Policies by their plans, and what a job may ask of them; length history and seeds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.latency import LatencyCurve
from streamrl.spec.scheduling import Dispatch
from streamrl_workers.scheduler.dispatch import POLICIES, Candidate, Work, policy
from streamrl_workers.scheduler.dispatch.makespan import Instance, fastest_first
from streamrl_workers.scheduler.dispatch.measured import Curves, fitted
from streamrl_workers.scheduler.dispatch.modelled import Model, plan_seconds
from streamrl_workers.scheduler.dispatch.policy import IN_ORDER, LONGEST_FIRST, in_order
from streamrl_workers.scheduler.lengths import LengthHistory, prompt_key
from streamrl_workers.scheduler.seeds import sample_seed

LENGTHS = [20.0, 5.0, 60.0, 10.0, 60.0]
EVEN = [1000.0 + place for place in range(63)]
STEEP = LatencyCurve.of_milliseconds([(1, 8), (64, 40)])
GUESSED = Curves().curve("p", slots=64)
FLAT = LatencyCurve.of_milliseconds([(1, 8), (64, 9)])


def candidates(lengths: list[float], *, batch_groups: int = 3) -> list[Candidate]:
    return [
        Candidate(group_id=number, wave=number // batch_groups, place=number % batch_groups, predicted_tokens=tokens)
        for number, tokens in enumerate(lengths)
    ]


def instances(count: int, *, slots: int = 8, curve: LatencyCurve = STEEP) -> list[Instance]:
    return [Instance(generator_id=f"g{number}", slots=slots, curve=curve) for number in range(count)]


def order(key: str, lengths: list[float], *, trusted: bool = True) -> list[int]:
    work = Work(trusted=trusted, groups=candidates(lengths), instances=instances(2, slots=1))
    plan = policy(key).plan(work, previous=IN_ORDER)
    return [candidate.group_id for candidate in sorted(work.groups, key=plan.key)]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("fifo", [0, 1, 2, 3, 4]),
        ("lateBinding", [2, 0, 1, 4, 3]),  # longest first within each batch of three
        ("skewAware", [2, 0, 1, 4, 3]),
        ("tailIsolation", [2, 0, 1, 4, 3]),
    ],
)
def test_order(key, expected):
    assert order(key, LENGTHS) == expected


@pytest.mark.parametrize("key", POLICIES)
def test_without_trust_every_policy_is_fifo(key):
    work = Work(trusted=False, groups=candidates(LENGTHS), instances=instances(4))
    plan = policy(key).plan(work, previous=IN_ORDER)
    assert [plan.key(group) for group in work.groups] == [IN_ORDER.key(group) for group in work.groups]
    assert not plan.tail_generators


@pytest.mark.parametrize("key", POLICIES)
def test_without_predictions_the_order_is_that_of_planning(key):
    assert order(key, [0.0] * 5) == [0, 1, 2, 3, 4]


def test_where_all_find_a_slot_nothing_is_begun_first():
    """It would only put the longest of all together on one generator."""
    fleet = instances(2, slots=3)
    work = Work(trusted=True, groups=candidates(LENGTHS), instances=fleet)
    assert policy("lateBinding").plan(work, previous=IN_ORDER) == in_order("there are slots for all samples")
    busy = [replace(one, running=(40.0, 50.0)) for one in fleet]  # what waits, waits for these
    work = Work(trusted=True, groups=candidates(LENGTHS), instances=busy, overlap=1)
    assert policy("lateBinding").plan(work, previous=IN_ORDER) == in_order("there are slots for all samples")


def test_an_order_that_is_slower_is_not_taken():
    """90 of the second batch begins when the first is through: at 25 instead of 20."""
    lengths = [5.0, 20.0, 50.0, 90.0, 20.0]
    work = Work(trusted=True, groups=candidates(lengths), instances=instances(2, slots=1))
    assert plan_seconds(LONGEST_FIRST, work) > plan_seconds(IN_ORDER, work)
    assert policy("lateBinding").plan(work, previous=IN_ORDER) == in_order("longest first would not be faster")


def test_prompts_that_nobody_knows_are_drawn_as_any_other():
    lengths = [float(tokens) for tokens in range(1, 41)]
    groups = candidates(lengths, batch_groups=40)
    groups[20:] = [replace(group, predicted_tokens=10.5, is_known=False) for group in groups[20:]]
    work = Work(trusted=True, groups=groups, instances=instances(2), rank_correlation=1.0)
    draws = Model(work).draws
    assert all(draw[:20] == lengths[:20] for draw in draws)
    assert len({tokens for draw in draws for tokens in draw[20:]}) > 10


def test_where_a_batch_follows_an_early_end_is_worth_more():
    """Alone, the one that is begun last runs fast, as others have ended; not where the next batch takes their places."""
    curve = LatencyCurve((1, 2), (0.5, 0.9))
    work = Work(
        trusted=True,
        groups=candidates([8.0, 8.0, 8.0, 20.0], batch_groups=4),
        instances=[Instance(generator_id="a", slots=2, curve=curve)],
    )
    alone, followed = (
        plan_seconds(IN_ORDER, found) - plan_seconds(LONGEST_FIRST, found) for found in (work, replace(work, overlap=1))
    )
    assert 0 < alone < followed / 5
    assert policy("lateBinding").plan(replace(work, overlap=1), previous=IN_ORDER) == LONGEST_FIRST


@pytest.mark.parametrize(
    ("curves", "pools", "longest_first"),
    [
        ((STEEP, STEEP), "pp", True),
        ((STEEP, STEEP.scaled(2.5)), "pq", True),
        ((STEEP, STEEP.scaled(4)), "pq", False),  # the longest may go to the slow one
        ((GUESSED, GUESSED), "pp", False),  # steps may get much slower with the last slots
        ((GUESSED, GUESSED), "pq", False),  # one of them may be slow
    ],
)
def test_the_longest_go_first_over_speeds_that_are_much_the_same(curves, pools, longest_first):
    fleet = [
        Instance(generator_id=f"g{number}", slots=2, curve=curve, pool=pool)
        for number, (curve, pool) in enumerate(zip(curves, pools, strict=True))
    ]
    lengths = [*EVEN[:20], 9000.0]
    work = Work(trusted=True, groups=candidates(lengths, batch_groups=21), instances=fleet)
    assert policy("lateBinding").plan(work, previous=IN_ORDER).longest_first is longest_first


@pytest.mark.parametrize(
    ("measured", "overlap", "longest_first"), [(2, 1, True), (1, 1, True), (3, 1, False), (3, 0, False)]
)
def test_the_lower_half_must_be_measured(measured, overlap, longest_first):
    """Whether an order pays rests there on how much faster steps get as a batch ends, and that would be a guess."""
    curve = fitted([(measured, 0.01, 1.0), (4, 0.012, 1.0)], slots=4)
    fleet = [Instance(generator_id=name, slots=4, curve=curve, pool="p") for name in "ab"]
    lengths = [*EVEN[:20], 9000.0]
    work = Work(trusted=True, groups=candidates(lengths, batch_groups=21), instances=fleet, overlap=overlap)
    assert policy("lateBinding").plan(work, previous=IN_ORDER).longest_first is longest_first


@pytest.mark.parametrize(("full_ms", "longest_first"), [(14, True), (16, False), (40, False)])
def test_the_order_is_that_of_planning_where_full_slots_are_worth_little(full_ms, longest_first):
    """With 4 of 8 slots taken a step takes 8 ms: half a token a ms."""
    fleet = instances(2, slots=8, curve=LatencyCurve.of_milliseconds([(1, 8), (4, 8), (8, full_ms)]))
    lengths = [*EVEN[:40], 9000.0]
    work = Work(trusted=True, groups=candidates(lengths, batch_groups=41), instances=fleet)
    plan = policy("lateBinding").plan(work, previous=IN_ORDER)
    assert (plan.longest_first, "tokens/s" in plan.why) == (longest_first, not longest_first)


@pytest.mark.parametrize("key", ["tailIsolation", "auto"])
def test_no_sides_over_speeds_that_nobody_measured(key):
    work = Work(trusted=True, groups=candidates([20_000.0, *EVEN]), instances=instances(4, slots=64, curve=GUESSED))
    assert not policy(key).plan(work, previous=IN_ORDER).tail_generators


@pytest.mark.parametrize("key", ["tailIsolation", "auto"])
def test_no_sides_beside_what_runs(key):
    """With dynamic sampling the next groups may be planned whole before the last of the batch before has ended."""
    work = Work(trusted=True, groups=candidates([20_000.0, *EVEN]), instances=instances(4, slots=64))
    busy = [replace(one, running=(5_000.0,) * 3) for one in work.instances]
    assert policy(key).plan(work, previous=IN_ORDER).tail_generators
    assert not policy(key).plan(replace(work, instances=busy), previous=IN_ORDER).tail_generators


@pytest.mark.parametrize("key", ["tailIsolation", "auto"])
def test_a_batch_that_has_begun_goes_on_as_it_is(key):
    """Speeds may get known when half of it is out."""
    work = Work(trusted=True, groups=candidates([20_000.0, *EVEN]), instances=instances(4, slots=64))
    begun = replace(work, begun=True)
    assert not policy(key).plan(begun, previous=IN_ORDER).tail_generators
    sides = policy(key).plan(work, previous=IN_ORDER)
    assert policy(key).plan(begun, previous=sides) is sides
    left = [one for one in work.instances if one.generator_id in sides.tail_generators]
    assert not policy(key).plan(replace(begun, instances=left), previous=sides).tail_generators


@pytest.mark.parametrize("key", ["tailIsolation", "auto"])
def test_no_sides_where_batches_overlap(key):
    """The generators that the model leaves to few are the next batch's too."""
    work = Work(trusted=True, groups=candidates([20_000.0, *EVEN]), instances=instances(4, slots=64))
    assert policy(key).plan(work, previous=IN_ORDER).tail_generators
    assert not policy(key).plan(replace(work, overlap=1), previous=IN_ORDER).tail_generators


@pytest.mark.parametrize(
    ("lengths", "fleet", "expected"),
    [
        ([*EVEN[:4], 9000.0, *EVEN[4:7]], instances(1, slots=2), "longest predicted first"),  # requests queue
        (
            [20_000.0] * 2 + EVEN,
            instances(4, slots=16),
            "the others on the rest",
        ),  # a few do, and the longest are better off with few others
        (EVEN * 4, instances(4, slots=16, curve=FLAT), "longest predicted first"),
        ([20_000.0, *EVEN], instances(4, slots=64), "alone on"),  # nothing queues, and it pays
        ([20_000.0, *EVEN], instances(4, slots=64, curve=FLAT), "in the order of planning"),
        ([1.0], [], "in the order of planning"),
        ([], instances(2), "in the order of planning"),
    ],
)
def test_auto_takes_what_pays(lengths, fleet, expected):
    work = Work(trusted=True, groups=candidates(lengths, batch_groups=64), instances=fleet)
    assert expected in policy("auto").plan(work, previous=IN_ORDER).why


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 20_000).map(float), min_size=1, max_size=40),
    st.lists(
        st.tuples(
            st.sampled_from([STEEP, FLAT, STEEP.scaled(2)]),
            st.sampled_from([2, 4, 16]),
            st.lists(st.integers(1, 9_000).map(float), max_size=2),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 4),
)
def test_auto_is_never_worse_than_fifo_by_the_model(lengths, fleet, samples):
    work = Work(
        trusted=True,
        groups=candidates(lengths, batch_groups=len(lengths)),
        samples=samples,
        instances=fastest_first(
            Instance(generator_id=f"g{number}", slots=slots, curve=curve, running=tuple(running))
            for number, (curve, slots, running) in enumerate(fleet)
        ),
    )
    plan = policy("auto").plan(work, previous=IN_ORDER)
    assert plan_seconds(plan, work) <= plan_seconds(IN_ORDER, work) * (1 + 1e-9)


def test_registry_and_contract_agree():
    assert tuple(POLICIES) == Dispatch.choices()


def test_options_are_those_of_the_job():
    asked = Dispatch.model_validate({"tailIsolation": {"gainPercent": 50}})
    work = Work(trusted=True, groups=candidates([20_000.0, *EVEN]), instances=instances(4, slots=64))
    assert policy("tailIsolation").plan(work, previous=IN_ORDER).tail_generators
    assert not policy(asked.key, asked.value).plan(work, previous=IN_ORDER).tail_generators


def test_unknown_policy_names_the_known():
    with pytest.raises(ValueError, match="unknown dispatch policy 'random'; known: fifo, lateBinding, skewAware"):
        policy("random")


def test_history_predicts_the_prompt_then_the_mean_then_nothing():
    history = LengthHistory()
    assert history.predict(1) == 0.0
    history.learn(1, mean_tokens=10.0)
    history.learn(1, mean_tokens=20.0)
    history.learn(2, mean_tokens=45.0)
    assert history.predict(1) == 15.0
    assert history.predict(3) == 30.0


def test_history_forgets_what_was_not_seen_for_long():
    history = LengthHistory({1: 1.0, 2: 2.0}, max_prompts=2)
    history.learn(1, mean_tokens=1.0)
    history.learn(3, mean_tokens=3.0)
    assert history.means() == {1: 1.0, 3: 3.0}
    assert history.predict(9) == 2.0


def test_prompt_key_is_stable_and_fits_63_bits():
    assert prompt_key("2 + 2 =") == prompt_key("2 + 2 =") != prompt_key("2 + 3 =")
    assert 0 < prompt_key("") < 1 << 63


def test_seeds_are_fixed_and_differ():
    seeds = {sample_seed(1, group_id=group, sample_index=index) for group in range(100) for index in range(16)}
    assert len(seeds) == 1600
    assert sample_seed(1, group_id=2, sample_index=3) == sample_seed(1, group_id=2, sample_index=3)
    assert sample_seed(0, group_id=0, sample_index=0) == 2558736989570252433
