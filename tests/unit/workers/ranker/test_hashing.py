"""The ranker `hashing`: what it learns, that it is deterministic and bounded."""

from math import isfinite, isnan
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.ranker.hashing import MAX_CHARS, SLOTS, HashingRanker, features
from streamrl_workers.scheduler.lengths.trust import measure

Pairs = list[tuple[str, float]]


def tasks(count: int, *, seed: int) -> Pairs:
    """Three kinds of question; how long an answer is follows from the kind and its numbers, and varies by a quarter."""
    draw, pairs = Random(seed), []
    for _ in range(count):
        kind, size = draw.randrange(3), draw.randint(1, 40)
        numbers = ", ".join(str(draw.randint(0, 99)) for _ in range(size))
        text, tokens = (
            (f"Sort these numbers in ascending order: {numbers}", 12.0 * size),
            (f"What is the sum of {numbers}? Give a number.", 30.0 + size),
            (f"Count down from {size * 5} to zero, one number a line.", 20.0 * size),
        )[kind]
        pairs.append((text, tokens * draw.lognormvariate(0, 0.25)))
    return pairs


def held_out_quality(ranker: HashingRanker) -> tuple[float, float]:
    """Recall at 20 % and rank correlation on prompts never seen."""
    pairs = tasks(600, seed=99)
    quality = measure(ranker.scores([prompt for prompt, _ in pairs]), [tokens for _, tokens in pairs])
    return quality.recall or 0.0, quality.rank_correlation or 0.0


def test_hashing_learns_while_a_run_goes_on() -> None:
    ranker = HashingRanker()
    for prompt, tokens in tasks(600, seed=1):
        ranker.learn(prompt, tokens)
    found, correlation = held_out_quality(ranker)
    assert found > 0.7
    assert correlation > 0.8


def test_hashing_knows_nothing_before_its_first_pair() -> None:
    assert isnan(HashingRanker().scores(["anything"])[0])


def test_hashing_is_deterministic() -> None:
    pairs = tasks(60, seed=3)
    one, other = HashingRanker(), HashingRanker()
    for ranker in (one, other):
        for prompt, tokens in pairs:
            ranker.learn(prompt, tokens)
    prompts = [prompt for prompt, _ in pairs]
    assert one.scores(prompts) == other.scores(prompts)


def test_one_absurd_length_does_not_undo_what_was_learnt() -> None:
    ranker = HashingRanker()
    for prompt, tokens in tasks(400, seed=1):
        ranker.learn(prompt, tokens)
    before, _ = held_out_quality(ranker)
    ranker.learn(tasks(1, seed=5)[0][0], 1e9)
    after, _ = held_out_quality(ranker)
    assert after > before - 0.1


@given(prompt=st.text(max_size=300), tokens=st.floats(0, 1e7))
@settings(max_examples=60)
def test_any_text_can_be_learnt_and_scored(prompt: str, tokens: float) -> None:
    ranker = HashingRanker()
    ranker.learn(prompt, tokens)
    ranker.learn(prompt, tokens / 2)
    (score,) = ranker.scores([prompt])
    assert -100 < score < 100


@given(prompt=st.text(max_size=300))
def test_features_lie_in_the_vector_and_are_never_empty(prompt: str) -> None:
    found = features(prompt)
    assert found
    assert all(0 <= slot < SLOTS and isfinite(value) for slot, value in found.items())


def test_features_of_a_long_text_are_bounded() -> None:
    assert len(features("word " * 10**6 + str(10**50))) < 200
    assert features("9" * 5000)
    assert features("a" * MAX_CHARS) != features("b" * MAX_CHARS)


def test_features_do_not_depend_on_the_process() -> None:
    """crc32 of the names: a file fitted elsewhere must fit here."""
    slots = sorted(features("Sort 3, 1, 2"))
    assert (len(slots), sum(slots)) == (54, 879136)
