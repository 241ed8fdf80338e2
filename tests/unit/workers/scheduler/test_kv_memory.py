"""No generator is given more than its memory for keys and values holds, and nobody waits for room that cannot come."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.scheduler.generators import KvBook, KvEstimate, KvSize
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths
from support.core_events import issued, joined, read_inbox, token
from support.core_world import World

PROMPT = len("train 0")
"""Its characters: what it counts as before a generator has tokenized it."""
TYPICAL = 2
"""A quarter of the job's 8 tokens."""
ONE = PROMPT + TYPICAL


@given(
    shares=st.booleans(),
    events=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 9), st.integers(0, 9))),
)
def test_the_book_is_the_sum_of_what_is_held(shares, events):
    book, held = KvBook(capacity_tokens=100, shares_prompts=shares), {}
    for lease, ends, prompt, completion in events:
        group = lease // 3
        if ends and lease in held:
            book.remove(lease, group)
            del held[lease]
        elif not ends:
            book.put(lease, group, KvSize(prompt, completion))
            held[lease] = KvSize(prompt, completion)
            if shares:  # a group has one prompt: what is known last is right
                held = {one: KvSize(prompt, was.completion) if one // 3 == group else was for one, was in held.items()}
        prompts = {one // 3 if shares else one: size.prompt for one, size in held.items()}
        assert book.tokens == sum(prompts.values()) + sum(size.completion for size in held.values())


def test_what_a_sample_counts_as():
    lengths = Lengths(LengthHistory(), signals=())
    estimate = KvEstimate(lengths, max_tokens=80)
    of = lambda tokens, context=0: estimate.size("x" * 9, prompt_tokens=None, tokens=tokens, context=context)  # noqa: E731 - the test's own words
    assert [of(0), of(16), of(40), of(80)] == [(9, 20), (9, 20), (9, 46), (9, 80)]
    assert of(100, context=100) == (9, 113)
    estimate.learn("y" * 30, tokens=10)
    assert of(0).prompt == 3
    for tokens in (30, 40, 50, 60):
        lengths.completions.add(tokens)
    assert of(0).completion == 55
    assert estimate.size("x", prompt_tokens=5, tokens=0, context=0).prompt == 5
    coming = estimate.size("x", prompt_tokens=5, tokens=0, context=0, coming="z" * 300)
    assert coming == (5, 113), "a later context's prompt counts with what is behind it"


def test_a_generator_gets_what_fits_and_the_rest_when_one_ends():
    run = small(kv=3 * ONE, slots=5)
    assert len(run.generators["g0"].active) == 3
    waits = run.core.view().waiting_samples
    assert waits
    lease = next(iter(run.generators["g0"].active))
    end(run, lease)
    assert len(run.generators["g0"].active) == 3
    assert run.core.view().waiting_samples == waits - 1


def test_what_grows_takes_room_and_is_not_told_idle():
    run = small(kv=3 * ONE, slots=5)
    first, *others = run.generators["g0"].active
    run.do(run.core.generator_progress("g0", items=[token(first, count=7)], now_s=0.0))
    end(run, others[0])
    assert len(run.generators["g0"].active) == 2, "the long one has taken the room"
    assert run.generators["g0"].idle == ""
    assert run.core.view().fleet.idle["no_prompts"] == 0


def test_a_prompt_that_turns_out_short_makes_room_at_once():
    run = small(kv=3 * ONE, slots=5)
    first = next(iter(run.generators["g0"].active))
    effects = run.core.generator_progress("g0", items=[token(first, prompt_tokens=bytes(4))], now_s=0.0)
    assert issued(effects), "seven characters were one token"


def test_shared_prompts_count_once():
    apart, shared = (small(kv=PROMPT + 4 * TYPICAL, slots=slots, group_size=4) for slots in (5, 6))
    assert [len(run.generators["g0"].active) for run in (apart, shared)] == [1, 4]


@pytest.mark.parametrize("kv", [1, ONE - 1])
def test_an_empty_generator_takes_any_sample(kv):
    run = small(kv=kv, slots=5)
    (lease,) = run.generators["g0"].active
    end(run, lease)
    assert len(run.generators["g0"].active) == 1


def test_evaluation_waits_for_room_ahead_of_training():
    run = small(kv=2 * (len("held_out 0") + TYPICAL), slots=5, evaluation_prompts=3)
    kinds = Counter(request.pinned for request in run.generators["g0"].active.values())
    assert kinds == {True: 2}
    assert run.core.view().waiting_samples > 1


def end(run: World, lease: int) -> None:
    del run.generators["g0"].active[lease]
    run.do(run.core.generator_progress("g0", items=[token(lease, finish_reason="stop")], now_s=0.0))
    read_inbox(run)


def small(*, kv: int, slots: int, **changes) -> World:
    """One generator with version 0 that has read what it was given."""
    run = joined(generators=0, slots=slots, **changes)
    run.kv = kv
    run.join_generator("g0")
    for _ in range(4):
        while run.prompts:
            run.deliver_prompts()
        while run.trainer.inbox:
            run.deliver_trainer()
        run.commit(100)
        read_inbox(run)
        if run.generators["g0"].wanted is not None:
            run.load_weights(run.generators["g0"])
    return run
