"""Every sample is in exactly one batch, and batches keep to the budget."""

import math
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.trainer.engines.packing import (
    PADDING_TOKENS,
    Layout,
    PackedSample,
    Pending,
    pack,
    pack_sample,
)
from support.trainer_groups import branched, make_group


def _sample(prompt_tokens: int, completion_tokens: int, *, mark: int) -> PackedSample:
    return PackedSample(
        group_id=mark,
        index=0,
        tokens=array("i", [mark] * (prompt_tokens + completion_tokens)),
        places_N=array("i", range(prompt_tokens, prompt_tokens + completion_tokens)),
        behaviour_N=array("f", [0.0] * completion_tokens),
        advantages_N=array("d", [1.0] * completion_tokens),
    )


lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 600)), max_size=60)


LAYOUTS = {kind: Layout(packed=kind == "packed", attention_tokens=1000.0) for kind in ("packed", "padded")}


@pytest.mark.parametrize("kind", LAYOUTS)
@given(lengths=lengths, budget_tokens=st.integers(16, 4096), ranks=st.integers(1, 5))
def test_rounds_cover_every_sample_once_within_the_budget(kind, lengths, budget_tokens, ranks):
    samples = [_sample(prompt, completion, mark=n) for n, (prompt, completion) in enumerate(lengths)]
    found = pack(samples, budget_tokens=budget_tokens, layout=LAYOUTS[kind], ranks=ranks)
    assert all(len(batches) == ranks and any(batches) for batches in found)
    batches = [batch for batches in found for batch in batches if batch]
    assert sorted(sample.tokens[0] for batch in batches for sample in batch) == list(range(len(samples)))
    for batches in found:
        limit = max(budget_tokens, *(sample.inputs for batch in batches for sample in batch))
        for batch in filter(None, batches):
            longest, tokens = max(sample.inputs for sample in batch), sum(sample.inputs for sample in batch)
            assert (tokens if kind == "packed" else longest * len(batch)) <= limit
            assert kind == "packed" or longest * len(batch) - tokens <= PADDING_TOKENS


@pytest.mark.parametrize(("median", "above_percent"), [(4096, 12), (12_288, 10)])
def test_eight_ranks_wait_little_for_each_other(median, above_percent):
    """Costs of an 8B, log-normal lengths; the figures of more seeds: benchmarks/packing.py."""
    layout, rng = Layout(packed=True, attention_tokens=57_000.0), random.Random(0)
    lengths = [min(32_768, max(64, int(rng.lognormvariate(math.log(median), 0.8)))) for _ in range(128)]
    samples = [_sample(1, length, mark=0) for length in lengths]
    rounds = pack(samples, budget_tokens=16_384, layout=layout, ranks=8)
    ideal = sum(layout.cost([sample]) for sample in samples) / 8
    assert 100 * sum(max(map(layout.cost, batches)) for batches in rounds) < (100 + above_percent) * ideal


def test_equal_samples_are_dealt_in_their_order():
    samples = [_sample(1, 10, mark=n) for n in range(6)]
    (found,) = pack(samples, budget_tokens=100, layout=LAYOUTS["packed"], ranks=2)
    assert [[sample.tokens[0] for sample in batch] for batch in found] == [[0, 2, 4], [1, 3, 5]]


@given(lengths=lengths, idle=st.lists(st.booleans(), min_size=60, max_size=60))
def test_pending_gives_every_sample_once(lengths, idle):
    pending, given_out = Pending(budget_tokens=400, layout=LAYOUTS["packed"], ranks=2), []
    for n, (prompt, completion) in enumerate(lengths):
        pending.add(_sample(prompt, completion, mark=n))
        given_out += [s for batches in pending.take(idle=idle[n]) for batch in batches for s in batch]
    given_out += [sample for batches in pending.take_all() for batch in batches for sample in batch]
    assert sorted(sample.tokens[0] for sample in given_out) == list(range(len(lengths)))
    assert pending.take_all() == []


@pytest.mark.parametrize("kind", LAYOUTS)
@given(lengths=lengths, ranks=st.integers(1, 4))
def test_what_a_micro_step_takes_does_not_depend_on_whether_the_trainer_is_idle(kind, lengths, ranks):
    """A replay knows of a micro-step which groups had come."""
    busy, idle = (Pending(budget_tokens=800, layout=LAYOUTS[kind], ranks=ranks) for _ in range(2))
    for n, (prompt, completion) in enumerate(lengths):
        busy.add(_sample(prompt, completion, mark=n))
        idle.add(_sample(prompt, completion, mark=n))
        if found := busy.take(idle=False):
            assert idle.take(idle=True) == found
    assert busy.take_all() == idle.take_all()


def test_a_micro_step_waits_for_the_budget_and_for_a_quarter_when_idle():
    pending = Pending(budget_tokens=40, layout=LAYOUTS["packed"])
    pending.add(_sample(1, 9, mark=0))  # 9 inputs
    assert pending.take(idle=False) == [] == pending.take(idle=True)
    pending.add(_sample(1, 1, mark=1))
    assert pending.take(idle=False) == []
    assert [[list(map(_inputs, batch)) for batch in batches] for batches in pending.take(idle=True)] == [[[9, 1]]]
    pending.add(_sample(1, 40, mark=2))
    assert [[list(map(_inputs, batch)) for batch in batches] for batches in pending.take(idle=False)] == [[[40]]]


def test_a_round_that_ranks_would_wait_in_stays_until_it_is_even_or_the_last():
    pending = Pending(budget_tokens=100, layout=LAYOUTS["packed"], ranks=2)
    for tokens in (60, 100, 100):
        pending.add(_sample(1, tokens, mark=tokens))
    found = [pending.take(idle=False), pending.take(idle=False), pending.take_all()]
    lengths = [[[list(map(_inputs, batch)) for batch in batches] for batches in rounds] for rounds in found]
    assert lengths == [[[[100], [100]]], [], [[[60], []]]]


def test_rounds_begin_while_samples_arrive_also_where_the_memory_holds_small_passes_alone():
    pending = Pending(budget_tokens=1000, layout=LAYOUTS["packed"])
    pending.room_tokens = 100
    for mark in range(20):
        pending.add(_sample(1, 50, mark=mark))
    assert [[list(map(_inputs, batch)) for batch in batches] for batches in pending.take(idle=False)] == [
        [[50, 50]]
    ] * 10


def _inputs(sample):
    return sample.inputs


def test_a_sample_knows_whether_it_is_of_the_trained_version():
    trajectory = make_group(0, step=3).samples[0]
    found = [pack_sample(trajectory, step=step, attempt=attempt) for step, attempt in ((3, 1), (4, 1), (3, 2))]
    assert [sample.version_lag for (sample,) in found] == [0, 1, 1]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("longest", [30, 600])
def test_a_streamed_step_keeps_all_ranks_busy(kind, ranks, longest):
    """The time of a round is that of its largest batch: with few samples idle ranks would take as long as one alone."""
    rng, pending, found = random.Random(0), Pending(budget_tokens=4096, layout=LAYOUTS[kind], ranks=ranks), []
    for n in range(32 * ranks):
        pending.add(_sample(8, rng.randint(longest // 2, longest), mark=n))
        found += pending.take(idle=n % 5 == 0)
    found += pending.take_all()
    sizes = [[sum(sample.inputs for sample in batch) for batch in payloads] for payloads in found]
    assert sum(map(sum, sizes)) / (ranks * sum(map(max, sizes))) > 0.7


def test_observations_are_seen_but_not_trained():
    trajectory = make_group(0, rewards=[1.0]).samples[0]
    total = len(trajectory.tokens) // 4
    for tokens, observation in ((2, False), (total - 4, True), (1, False), (1, True)):
        trajectory.segments.add(tokens=tokens, observation=observation)
    (sample,) = pack_sample(trajectory, advantage=1.0, step=0, attempt=1)
    prompt = len(trajectory.prompt_tokens) // 4
    assert list(sample.places_N) == [prompt, prompt + 1, prompt + total - 2]
    assert len(sample.tokens) == prompt + total - 1  # what comes behind the last trained token is not seen
    assert len(sample.behaviour_N) == len(sample.advantages_N) == sample.trained == 3


def test_each_context_is_a_sequence_of_its_own():
    trajectory = branched(0, [1.0, 1.0, 1.0]).samples[2]
    prompt, tokens = list(unpack_int32(trajectory.prompt_tokens)), list(unpack_int32(trajectory.tokens))
    turn, prompt_1, turn_1, prompt_2, turn_2, answer, last = (segment.tokens for segment in trajectory.segments)
    begin_1, begin_2 = turn, turn + prompt_1 + turn_1
    found = pack_sample(trajectory, advantage=1.0, step=1, attempt=1)
    assert [(one.group_id, one.index, one.context) for one in found] == [(0, 2, 0), (0, 2, 1), (0, 2, 2)]
    assert [list(one.tokens) for one in found] == [
        prompt + tokens[:turn],
        tokens[begin_1:begin_2],
        tokens[begin_2:],
    ]
    third = [*range(prompt_2, prompt_2 + turn_2), *range(prompt_2 + turn_2 + answer, prompt_2 + turn_2 + answer + last)]
    assert [list(one.places_N) for one in found] == [
        list(range(len(prompt), len(prompt) + turn)),
        list(range(prompt_1, prompt_1 + turn_1)),
        third,
    ]
    drawn = [logprob for logprob in unpack_float32(trajectory.logprobs) if logprob]
    assert [logprob for one in found for logprob in one.behaviour_N] == drawn
    assert {one.trained + one.trained_elsewhere for one in found} == {len(drawn)}
