"""`mathVerify`: what is read as the answer and what is equal, by table."""

import signal
from typing import Any

import pytest

from streamrl_workers.rewards.base import Item, Scorer
from streamrl_workers.rewards.registry import make_parts
from support.task_jobs import make_task


@pytest.fixture(scope="module")
def score() -> Scorer:
    def verify(answer: str, item: Item) -> float:
        raise AssertionError("mathVerify does not ask the data set")

    rewards: Any = make_task(rewards=[{"name": "it", "mathVerify": {}}]).rewards
    (part,) = make_parts(rewards, verify=verify, base_dir=None)  # type: ignore[arg-type] # it has no files
    return part.value


def item(answer: str | None) -> Item:
    return Item(prompt="?", target="", question="?", answer=answer, metadata={}, source_index=0)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so \\boxed{42}", "42", 1),
        ("so \\boxed{42}", "She has 6*7=<<6*7=42>>42 eggs.\n#### 42", 1),
        ("6*7=42\n#### 42", "6*7=42\n#### 42", 1),
        ("6*7=42\n#### 41", "6*7=42\n#### 42", 0),
        ("#### 1,234", "#### 1234", 1),
        ("The answer is 1234.", "#### 1,234", 1),
        ("**18**", "$18", 1),
        ("18 dollars", "\\$18", 1),
        ("18.0", "18", 1),
        ("-18", "18", 0),
        ("50%", "0.5", 1),
        ("$\\frac{1}{2}$", "0.5", 1),
        ("0.5", "\\frac12", 1),
        ("$1 + x$", "x+1", 1),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1),
        ("\\boxed{(3, \\frac{\\pi}{2})}", "\\left( 3, \\frac{\\pi}{2} \\right)", 1),
        ("\\boxed{x = 2}", "2", 1),
        ("\\boxed{C}", "\\text{(C)}", 1),
        ("\\boxed{41} I mean 42", "42", 0),
        ("it may be 41, but it is 42", "42", 1),
        ("<think>it is 42</think>\\boxed{41}", "42", 0),
        ("<think>\\boxed{41}</think>It is 42.", "42", 1),
        ("", "42", 0),
        ("no idea", "42", 0),
        ("\\boxed{", "42", 0),
        ("\\boxed{\\frac{}{}}", "42", 0),
        ("\ud800 \x00 42", "42", 1),
        # a number as programs write it
        ("\\boxed{0.00001}", "1e-05", 1),
        ("\\boxed{10^{-5}}", "1e-5", 1),
        ("\\boxed{1e-5}", "0.00001", 1),
        ("it is 1e-05.", "1e-05", 1),
        ("\\boxed{1500}", "1.5E+3", 1),
        ("10000000000000000", "1e+16", 1),
        ("\\boxed{-0.00001}", "1e-05", 0),
        ("\\boxed{e - 5}", "1e-7", 0),
        ("\\boxed{2e - 1}", "2e-1", 1),
        ("1", "1e-400", 0),
        (f"\\boxed{{1{'0' * 400}}}", f"1{'0' * 400}", 1),
        ("\\boxed{0.0000003}", "1e-7", 0),
        ("\\boxed{0}", "1e-7", 0),
        ("\\boxed{0.333333}", "1/3", 1),
        # degrees, and the sign of minus
        ("\\boxed{90}", "90°", 1),
        ("\\boxed{90°}", "90", 1),
        ("it is 90°.", "90^\\circ", 1),
        ("\\boxed{20°C}", "20", 1),
        ("\\boxed{-90°}", "90°", 0),
        ("It is \N{MINUS SIGN}5.", "-5", 1),
        ("\\boxed{5}", "\N{MINUS SIGN}5", 0),
        # the last of several boxes
        ("\\boxed{2} then \\boxed{3}", "3", 1),
        ("\\boxed{2} then \\boxed{3}", "2", 0),
        ("\\boxed{2}\\boxed{\\frac{6}{2}}. Check: \\boxed{", "3", 1),
        ("\\boxed{2} \\{ and \\boxed{3}", "2, 3", 1),
    ],
)
def test_what_is_equal(score: Scorer, completion: str, answer: str, expected: float) -> None:
    assert score(completion, item(answer)) == expected


@pytest.mark.parametrize("answer", ["", "####", "a and #### ", "{", "½", "45°30'"])
def test_a_reference_that_cannot_be_read_is_an_error_with_its_text(score: Scorer, answer: str) -> None:
    with pytest.raises(ValueError, match="cannot be read as mathematics") as caught:
        score("42", item(answer))
    assert repr(answer) in str(caught.value)


def test_without_a_reference_nothing_can_be_scored(score: Scorer) -> None:
    with pytest.raises(ValueError, match="no reference answer"):
        score("42", item(None))


def test_an_alarm_of_others_is_left_alone(score: Scorer) -> None:
    remaining_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 1000)
    try:
        assert score("\\boxed{\\frac{84}{2}}", item("42")) == 1
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0, "math-verify has used and ended the alarm"
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining_s, interval_s)
