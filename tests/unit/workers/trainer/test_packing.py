"""Every sample is in exactly one batch, and batches keep to the budget."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.trainer.engines.packing import (
    PADDING_TOKENS,
    PackedSample,
    Pending,
    pack,
    pack_for_ranks,
    pack_sample,
    rounds,
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


@given(lengths=lengths, budget_tokens=st.integers(16, 4096))
def test_cut_covers_every_sample_once_within_the_budget(lengths, budget_tokens):
    samples = [_sample(prompt, completion, mark=n) for n, (prompt, completion) in enumerate(lengths)]
    batches = pack(samples, budget_tokens=budget_tokens)
    assert sorted(sample.tokens[0] for batch in batches for sample in batch) == list(range(len(samples)))
    for batch in batches:
        longest = max(sample.inputs for sample in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget_tokens
        assert sum(longest - sample.inputs for sample in batch) <= PADDING_TOKENS


@given(lengths=lengths, idle=st.lists(st.booleans(), min_size=60, max_size=60))
def test_pending_gives_every_sample_once(lengths, idle):
    pending, given_out = Pending(budget_tokens=400), []
    for n, (prompt, completion) in enumerate(lengths):
        pending.add(_sample(prompt, completion, mark=n))
        given_out += [sample for batch in pending.take(idle=idle[n]) for sample in batch]
    given_out += [sample for batch in pending.take_all() for sample in batch]
    assert sorted(sample.tokens[0] for sample in given_out) == list(range(len(lengths)))
    assert pending.take_all() == []


def test_a_micro_step_waits_for_the_budget_and_for_a_quarter_when_idle():
    pending = Pending(budget_tokens=40)
    pending.add(_sample(1, 9, mark=0))  # 9 inputs
    assert pending.take(idle=False) == [] == pending.take(idle=True)
    pending.add(_sample(1, 1, mark=1))
    assert pending.take(idle=False) == []
    assert sum(map(len, pending.take(idle=True))) == 2
    pending.add(_sample(1, 40, mark=2))
    assert sum(map(len, pending.take(idle=False))) == 1


def test_a_sample_knows_whether_it_is_of_the_trained_version():
    trajectory = make_group(0, step=3).samples[0]
    found = [pack_sample(trajectory, step=step, attempt=attempt) for step, attempt in ((3, 1), (4, 1), (3, 2))]
    assert [sample.version_lag for (sample,) in found] == [0, 1, 1]


@given(count=st.integers(0, 9), ranks=st.integers(1, 4))
def test_rounds_give_every_rank_one_batch(count, ranks):
    batches = [[_sample(1, 1, mark=n)] for n in range(count)]
    found = rounds(batches, ranks=ranks)
    assert all(len(payloads) == ranks for payloads in found)
    assert [payload for payloads in found for payload in payloads if payload] == batches
    assert sum(not payload for payloads in found for payload in payloads) < ranks


@given(lengths=lengths, budget_tokens=st.integers(16, 4096), ranks=st.integers(1, 5))
def test_what_is_dealt_to_ranks_covers_every_sample_once_within_the_budget(lengths, budget_tokens, ranks):
    samples = [_sample(prompt, completion, mark=n) for n, (prompt, completion) in enumerate(lengths)]
    batches = pack_for_ranks(samples, budget_tokens=budget_tokens, ranks=ranks)
    assert sorted(sample.tokens[0] for batch in batches for sample in batch) == list(range(len(samples)))
    for batch in batches:
        longest = max(sample.inputs for sample in batch)
        assert len(batch) == 1 or longest * len(batch) <= budget_tokens
        assert sum(longest - sample.inputs for sample in batch) <= PADDING_TOKENS
    assert len(batches) % ranks == 0 or all(len(batch) == 1 for batch in batches)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("longest", [30, 600])
def test_a_streamed_step_keeps_all_ranks_busy(ranks, longest):
    """The time of a round is that of its largest batch: with few samples idle ranks would take as long as one alone."""
    rng, pending, found = random.Random(0), Pending(budget_tokens=4096, ranks=ranks), []
    for n in range(32 * ranks):
        pending.add(_sample(8, rng.randint(longest // 2, longest), mark=n))
        found += rounds(pending.take(idle=n % 5 == 0), ranks=ranks)
    found += rounds(pending.take_all(), ranks=ranks)
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
