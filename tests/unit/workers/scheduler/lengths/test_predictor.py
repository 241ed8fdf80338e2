"""The ladder: who answers, how scores become tokens, what is judged, what a restart keeps."""

from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, Prediction, prompt_key
from streamrl_workers.scheduler.lengths.predictor import MAX_GROUPS
from streamrl_workers.scheduler.lengths.trust import MIN_PAIRS


def lengths_of(*signals: str, means: dict[int, float] | None = None, answers: Mapping[str, float] = {}) -> Lengths:
    """`answers`: of the ranker, before anything is asked."""
    lengths = Lengths(LengthHistory(means), signals=signals)
    lengths.ranked({prompt_key(prompt): score for prompt, score in answers.items()})
    return lengths


def finish(lengths: Lengths, group_id: int, *, prompt: str, tokens: list[int]) -> None:
    lengths.began(group_id, key=prompt_key(prompt))
    lengths.learn(prompt_key(prompt), tokens=tokens, prompt=prompt, group_id=group_id)


def test_of_a_prompt_never_seen_history_knows_nothing() -> None:
    lengths = lengths_of("History", "Siblings", means={1: 10.0, 2: 30.0, 3: 50.0})
    assert lengths.predict(9) == Prediction(tokens=30.0, source="Nothing", share=0.5)
    assert lengths.predict(3).source == "History"


def test_nothing_at_all_is_known_at_the_start() -> None:
    assert lengths_of("History", "Siblings").predict(1) == Prediction(tokens=0.0, source="Nothing", share=0.5)


@pytest.mark.parametrize(
    ("signals", "prompt", "source"),
    [
        (("History", "Ranker"), "both", "History"),
        (("Ranker", "History"), "both", "Ranker"),
        (("History", "Ranker"), "ranked", "Ranker"),
        (("History",), "ranked", "Nothing"),
        (("Ranker",), "both", "Ranker"),
        (("Siblings",), "both", "Nothing"),
        (("History", "History"), "both", "History"),
    ],
)
def test_the_first_signal_that_knows_answers(signals: tuple[str, ...], prompt: str, source: str) -> None:
    lengths = lengths_of(*signals, means={prompt_key("both"): 10.0}, answers={"both": 1.0, "ranked": 2.0})
    assert lengths.predict(prompt_key(prompt)).source == source


def test_a_ranker_may_not_know_either() -> None:
    lengths = lengths_of("Ranker")
    assert lengths.predict(1).source == "Nothing"


@given(seed=st.integers(0, 1000), factor=st.floats(1e-6, 1e6), shift=st.floats(-1e6, 1e6))
@settings(max_examples=20)
def test_only_the_ranks_of_scores_count(seed: int, factor: float, shift: float) -> None:
    """Whatever scale a ranker's scores have, predictions are the same, and within the lengths seen."""
    draw = Random(seed)
    words = [draw.random() for _ in range(40)]
    scaled = lengths_of("Ranker", answers={str(word): round(word, 3) * factor + shift for word in words})
    plain = lengths_of("Ranker", answers={str(word): round(word, 3) for word in words})
    for lengths in (scaled, plain):
        for number, word in enumerate(words):
            finish(lengths, number, prompt=str(word), tokens=[100 + number, 300])
    found = [plain.predict(prompt_key(str(word))) for word in words]
    assert [scaled.predict(prompt_key(str(word))).tokens for word in words] == pytest.approx(
        [prediction.tokens for prediction in found], rel=0.2
    )
    assert all(100 <= prediction.tokens <= 300 and 0 <= prediction.share <= 1 for prediction in found)


def test_tokens_are_the_quantile_of_recent_completions_at_the_share() -> None:
    lengths = lengths_of("Ranker", answers={str(half / 2): half / 2 for half in range(200)})
    for number in range(100):
        finish(lengths, number, prompt=str(float(number)), tokens=[10 * number, 10 * number])
    long, short = (lengths.predict(prompt_key(text)) for text in ("94.5", "4.5"))
    assert (long.share, short.share) == (pytest.approx(0.945, abs=0.02), pytest.approx(0.05, abs=0.02))
    assert (long.tokens, short.tokens) == (pytest.approx(940, abs=25), pytest.approx(45, abs=25))


def test_growing_lengths_do_not_outdate_the_past() -> None:
    """Prompts keep their order while all lengths double: the past is read by its ranks."""
    means = {number: 100.0 + number for number in range(200)}
    lengths = lengths_of("History", means=means)
    for number in range(4096):
        lengths.learn(10_000, tokens=[2 * (100 + number % 200)])
    middle, longest = lengths.predict(100), lengths.predict(199)
    assert middle.tokens == pytest.approx(400, rel=0.05)
    assert longest.tokens == pytest.approx(598, rel=0.05)


def test_siblings_are_shrunk_towards_what_was_thought() -> None:
    lengths = lengths_of("History", "Siblings", means={n: 10.0 * n for n in range(1, 41)})
    few, many = lengths.predict(20, siblings=[300]), lengths.predict(20, siblings=[300] * 30)
    assert few.source == many.source == "Siblings"
    assert 200 < few.tokens < many.tokens <= 300
    assert few.tokens == pytest.approx((2 * lengths.predict(20).tokens + 300) / 3)
    assert many.share > few.share > 0.5


def test_siblings_alone_are_believed_where_nothing_was_thought() -> None:
    assert lengths_of("Siblings").predict(1, siblings=[40, 60]) == Prediction(tokens=50.0, source="Siblings", share=0.5)


def test_siblings_are_not_looked_at_without_the_signal() -> None:
    assert lengths_of("History", means={1: 10.0}).predict(1, siblings=[500]).source == "History"


def test_a_new_answer_counts_when_the_group_of_the_old_one_has_finished() -> None:
    lengths = lengths_of("Ranker", answers={"a": 5.0, "b": 1.0})
    shares = [lengths.predict(prompt_key(prompt)).share for prompt in "bab"]
    lengths.ranked({prompt_key("a"): 0.0})
    shares.append(lengths.predict(prompt_key("a")).share)
    finish(lengths, 1, prompt="a", tokens=[7, 9])
    shares.append(lengths.predict(prompt_key("a")).share)
    assert shares == [0.5, 0.75, 0.5, 0.75, pytest.approx(1 / 6)]


def test_what_the_ranker_is_asked_and_taught() -> None:
    lengths, without = lengths_of("Ranker"), lengths_of("History")
    for one in (lengths, without):
        one.expect("a")
        finish(one, 1, prompt="a", tokens=[7, 9])
    assert lengths.take_questions() == (((prompt_key("a"), "a"),), (("a", 8.0),))
    assert lengths.take_questions() == without.take_questions() == ((), ())


def rounds(lengths: Lengths, *, prompts: int, epochs: int, length: Callable[[int, int], int]) -> list[bool]:
    """Groups of `epochs` passes over the prompts; trust after each."""
    trust = []
    for number in range(prompts * epochs):
        prompt = str(number % prompts)
        tokens = [length(number % prompts, number // prompts)] * 2
        lengths.predict(prompt_key(prompt))
        finish(lengths, number, prompt=prompt, tokens=tokens)
        trust.append(lengths.trusted)
    return trust


def test_history_is_trusted_in_the_second_epoch() -> None:
    draw = Random(0)
    means = [draw.randint(10, 1000) for _ in range(400)]
    lengths = lengths_of("History", "Siblings")
    trust = rounds(lengths, prompts=400, epochs=2, length=lambda prompt, _: means[prompt])
    assert trust.index(True) == 400 + MIN_PAIRS - 1
    assert all(trust[400 + MIN_PAIRS :])
    assert (lengths.trusted, lengths.trusted_signals) == (True, {"History"})
    assert lengths.predictions == {"Nothing": 400, "History": 400}
    assert lengths.quality["History"].recall > 0.9


def test_once_a_signal_is_trusted_the_others_are_passed_over() -> None:
    draw = Random(1)
    means = [draw.randint(10, 1000) for _ in range(400)]
    inverted = {str(prompt): -float(mean) for prompt, mean in enumerate(means)} | {"450": 0.0}
    lengths = lengths_of("Ranker", "History", answers=inverted)
    assert lengths.predict(prompt_key("5")).source == "Ranker", "as long as nobody is"
    rounds(lengths, prompts=400, epochs=3, length=lambda prompt, _: means[prompt])
    assert lengths.trusted_signals == {"History"}
    assert lengths.predict(prompt_key("5")).source == "History"
    assert lengths.predict(prompt_key("450")).source == "Nothing"


@pytest.mark.parametrize("knows", [True, False])
def test_a_ranker_is_trusted_in_the_first_epoch_if_it_knows(knows: bool) -> None:
    draw = Random(3)
    means = [draw.randint(10, 1000) for _ in range(500)]
    answers = {str(prompt): float(mean) if knows else draw.random() for prompt, mean in enumerate(means)}
    trust = rounds(
        lengths_of("History", "Ranker", answers=answers), prompts=500, epochs=1, length=lambda p, _: means[p]
    )
    assert trust == [False] * (MIN_PAIRS - 1) + [knows] * (500 - MIN_PAIRS + 1)


def test_what_is_judged_is_what_was_said_when_the_group_began() -> None:
    """A group that is issued again is judged by its first prediction; one that is dropped, not at all."""
    keys = [prompt_key("x" * group_id) for group_id in range(40)]
    lengths = lengths_of("Ranker", answers={"x" * group_id: group_id for group_id in range(40)})
    for group_id, key in enumerate(keys):
        lengths.began(group_id, key=key)
    lengths.ranked({key: -group_id for group_id, key in enumerate(keys)})
    for group_id, key in enumerate(keys):
        lengths.began(group_id, key=key)
    lengths.forget(3, key=keys[3])
    for group_id, key in enumerate(keys):
        lengths.learn(key, tokens=[group_id + 1], group_id=group_id)
    quality = lengths.quality["Ranker"]
    assert quality.pairs == 32, "39 pairs, looked at in sixteens"
    assert quality.rank_correlation is not None
    assert quality.rank_correlation > 0.9
    assert lengths.predictions.total() == 40


def test_a_restart_keeps_the_past_of_each_prompt_and_asks_for_new_evidence() -> None:
    draw = Random(2)
    means = {prompt_key(str(number)): float(draw.randint(10, 1000)) for number in range(400)}
    lengths = lengths_of("History", "Siblings", means=means)
    longest = max(means, key=lambda key: means[key])
    assert not lengths.trusted
    found = lengths.predict(longest)
    assert (found.source, found.tokens) == ("History", pytest.approx(means[longest], rel=0.05))
    assert found.share > 0.99


def test_what_is_kept_is_bounded() -> None:
    lengths = lengths_of("History")
    for number in range(MAX_GROUPS + 100):
        lengths.began(number, key=number)
    lengths.learn(1, tokens=[5], group_id=1)
    assert lengths.quality["History"].pairs == 0, "the oldest was forgotten, and nothing breaks"
