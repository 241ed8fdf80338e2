"""Rankers: what they learn, that they are deterministic and bounded, and their files."""

import json
from math import isfinite
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.spec.scheduling import Ranker as RankerChoice
from streamrl_workers.scheduler.lengths import prompt_key
from streamrl_workers.scheduler.lengths.quality import rank_correlation, recall
from streamrl_workers.scheduler.lengths.rankers import RANKERS, HashingRanker, ScoresRanker, make_ranker
from streamrl_workers.scheduler.lengths.rankers.features import MAX_CHARS, SLOTS, features
from streamrl_workers.scheduler.lengths.rankers.files import open_ranker, read_ranker, write_ranker

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
    scores, tokens = [ranker.score(prompt) or 0.0 for prompt, _ in pairs], [tokens for _, tokens in pairs]
    return recall(scores, tokens, percent=20).value, rank_correlation(scores, tokens) or 0.0


def test_hashing_learns_from_pairs_at_hand() -> None:
    ranker = HashingRanker()
    ranker.fit(tasks(600, seed=1), passes=6)
    found, correlation = held_out_quality(ranker)
    assert found > 0.75
    assert correlation > 0.85


def test_hashing_learns_while_a_run_goes_on() -> None:
    ranker = HashingRanker()
    for prompt, tokens in tasks(600, seed=1):
        ranker.learn(prompt, tokens)
    found, correlation = held_out_quality(ranker)
    assert found > 0.7
    assert correlation > 0.8


def test_hashing_knows_nothing_before_its_first_pair() -> None:
    assert HashingRanker().score("anything") is None


def test_hashing_is_deterministic_and_goes_on_from_its_state() -> None:
    pairs = tasks(60, seed=3)
    one, other = HashingRanker(), HashingRanker()
    for ranker in (one, other):
        for prompt, tokens in pairs:
            ranker.learn(prompt, tokens)
    state = json.loads(json.dumps(one.state()))
    assert state == json.loads(json.dumps(other.state()))
    again = make_ranker("hashing", state)
    assert [again.score(prompt) for prompt, _ in pairs] == [one.score(prompt) for prompt, _ in pairs]


def test_one_absurd_length_does_not_undo_what_was_learnt() -> None:
    ranker = HashingRanker()
    ranker.fit(tasks(400, seed=1), passes=4)
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
    score = ranker.score(prompt)
    assert score is not None
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


def test_a_table_of_scores_knows_its_prompts_alone() -> None:
    table = ScoresRanker({prompt_key("a"): 1.5})
    table.learn("b", 9.0)
    assert (table.score("a"), table.score("b")) == (1.5, None)
    again = make_ranker("scores", json.loads(json.dumps(table.state())))
    assert (again.score("a"), again.score("b")) == (1.5, None)


def test_an_unknown_ranker_names_the_known() -> None:
    with pytest.raises(ValueError, match=f"unknown ranker 'odd'; known: {', '.join(RANKERS)}"):
        make_ranker("odd")


# ---- files


def choice(**member: object) -> RankerChoice:
    return RankerChoice.model_validate(member)


def test_a_job_without_a_ranker_has_none(tmp_path: Path) -> None:
    assert open_ranker(None, base_dir=tmp_path) is None


def test_a_job_may_start_with_an_empty_ranker(tmp_path: Path) -> None:
    assert isinstance(open_ranker(choice(hashing={}), base_dir=tmp_path), HashingRanker)


def test_a_job_starts_from_its_file(tmp_path: Path) -> None:
    fitted = HashingRanker()
    fitted.learn("a b c", 50.0)
    write_ranker(tmp_path / "ranker.json", key="hashing", state=fitted.state())
    opened = open_ranker(choice(hashing={"path": "ranker.json"}), base_dir=tmp_path)
    assert opened is not None
    assert opened.score("a b c") == fitted.score("a b c")
    write_ranker(tmp_path / "scores.json", key="scores", state=ScoresRanker({prompt_key("a"): 2.0}).state())
    table = open_ranker(choice(scores={"path": "scores.json"}), base_dir=tmp_path)
    assert table is not None
    assert table.score("a") == 2.0


GOOD_STATE = HashingRanker().state()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "must be a JSON object that `streamrl rank` wrote"),
        ("[]", "must be a JSON object that `streamrl rank` wrote"),
        ("{}", "must name its ranker, one of hashing, scores"),
        ({"ranker": "odd"}, "must name its ranker, one of hashing, scores, got 'odd'"),
        ({"ranker": "scores", "scores": {}}, "must be a file of the ranker hashing"),
        ({"ranker": "scores", "scores": 3}, "is not a table of scores"),
        ({"ranker": "scores", "scores": {"x": 1}}, "holds a prompt key or a score that is no number"),
        ({"ranker": "scores", "scores": {"1": float("nan")}}, "holds a score that is not finite"),
        ({"ranker": "hashing"}, "is not a hashing ranker of format 1 with 32768 slots"),
        ({"ranker": "hashing", **GOOD_STATE, "slots": 5}, "is not a hashing ranker of format 1"),
        ({"ranker": "hashing", **GOOD_STATE, "weights": [[1, 2]]}, "is damaged: ValueError"),
        ({"ranker": "hashing", **GOOD_STATE, "weights": [[-1, 0.0, 0.0]]}, "is damaged: ValueError: slot -1"),
        ({"ranker": "hashing", **GOOD_STATE, "weights": [[1, float("inf"), 0.0]]}, "is damaged: ValueError: slot 1"),
        ({"ranker": "hashing", **GOOD_STATE, "weights": None}, "is damaged: TypeError"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: object, line: str) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "ranker.json").write_text(text)
    with pytest.raises(UserError) as caught:
        open_ranker(choice(hashing={"path": "ranker.json"}), base_dir=tmp_path)
    assert str(caught.value).startswith(f"spec.scheduling.ranker.hashing.path: {line}")


def test_reading_says_which_ranker_wrote_it(tmp_path: Path) -> None:
    write_ranker(tmp_path / "f", key="hashing", state=HashingRanker().state())
    assert read_ranker(tmp_path / "f", field="FILE")[0] == "hashing"
