"""Rewards by table: extraction, equality, patterns, functions, sums, and the user's mistakes."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl_workers.rewards.base import Item, make_extract
from streamrl_workers.rewards.registry import BadValueError, Part, make_parts
from support.task_jobs import make_task

FUNCTIONS = """
def length(*, prompt, completion, answer, metadata):
    metadata["seen"] = True
    return len(completion) + metadata["bonus"]

def everything(**given):
    return given["answer"] in given["completion"]

def too_few(*, prompt, completion):
    return 1.0

def nothing(**given):
    return None

def not_a_number(**given):
    return float("nan")

def text(**given):
    return "1.0"

def huge(**given):
    return 10 ** 400

value = 3
"""


def item(answer: str | None = "42") -> Item:
    return Item(prompt="6*7=", target="", question="6*7", answer=answer, metadata={"bonus": 1}, source_index=0)


def parts_of(rewards: list[dict[str, Any]], base_dir: Path = Path()) -> tuple[Part, ...]:
    def verify(answer: str, item: Item) -> float:
        return 0.5 if answer == item.answer else 0.0

    return make_parts(make_task(rewards=rewards).rewards, verify=verify, base_dir=base_dir)


def score(reward: dict[str, Any], completion: str, *, answer: str | None = "42", base_dir: Path = Path()) -> float:
    (part,) = parts_of([{"name": "it", **reward}], base_dir)
    return part.value(completion, item(answer))


@pytest.fixture
def code_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "reward_functions_of_test.py").write_text(FUNCTIONS)
    (tmp_path / "reward_module_that_raises.py").write_text("1 / 0")
    (tmp_path / "reward_module_that_lacks.py").write_text("import no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "completion", "answer"),
    [
        (None, " whole ", " whole "),
        (r"\d+", "1 then 22", "22"),
        (r"<a>(.*?)</a>", "<a>1</a> no <a>2</a>", "2"),
        (r"<a>(.*?)</a>", "none", None),
        (r"(x)?y", "y", None),
        (r"(a)(b)", "ab", "a"),
        (r"", "abc", ""),
    ],
)
def test_answer_is_the_first_group_of_the_last_match(pattern: str | None, completion: str, answer: str | None) -> None:
    assert make_extract(pattern, field="f")(completion) == answer


@pytest.mark.parametrize(
    ("reward", "completion", "value"),
    [
        ({"exactMatch": {}}, " 42\n", 1.0),
        ({"exactMatch": {}}, "142", 0.0),
        ({"exactMatch": {"answerPattern": r"=(\d+)"}}, "6=6=42", 1.0),
        ({"exactMatch": {"answerPattern": r"=(\d+)"}}, "42", 0.0),
        ({"regex": {"pattern": "^4"}}, "42", 1.0),
        ({"regex": {"pattern": "^2"}}, "42", 0.0),
        ({"verifier": {}}, "42", 0.5),
        ({"verifier": {"answerPattern": r"\d+"}}, "I say 42.", 0.5),
        ({"verifier": {"answerPattern": r"\d+"}}, "I say nothing", 0.0),
    ],
)
def test_values(reward: dict[str, Any], completion: str, value: float) -> None:
    assert score(reward, completion) == value


@pytest.mark.parametrize(("ignore_case", "value"), [(True, 1.0), (False, 0.0)])
def test_case(ignore_case: bool, value: float) -> None:
    assert score({"exactMatch": {"ignoreCase": ignore_case}}, "STRASSE", answer="straße") == value


def test_no_reference_answer_is_a_failure_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no reference answer"):
        score({"exactMatch": {}}, "42", answer=None)


def test_python_functions_see_the_sample_and_cannot_change_the_item(code_dir: Path) -> None:
    (part,) = parts_of([{"name": "it", "python": {"function": "reward_functions_of_test:length"}}], code_dir)
    one = item()
    assert part.value("abc", one) == 4.0
    assert one.metadata == {"bonus": 1}
    assert score({"python": {"function": "reward_functions_of_test:everything"}}, "is 42", base_dir=code_dir) == 1.0


@pytest.mark.parametrize("name", ["nothing", "not_a_number", "text", "huge"])
def test_what_is_no_finite_number_fails(code_dir: Path, name: str) -> None:
    with pytest.raises((BadValueError, OverflowError)):
        score({"python": {"function": f"reward_functions_of_test:{name}"}}, "", base_dir=code_dir)


@pytest.mark.parametrize(
    ("reward", "field", "text"),
    [
        ({"regex": {"pattern": "("}}, "regex.pattern", "must be a regular expression"),
        ({"verifier": {"answerPattern": "[z-a]"}}, "verifier.answerPattern", "must be a regular expression"),
        ({"exactMatch": {"answerPattern": "*"}}, "exactMatch.answerPattern", "must be a regular expression"),
        ({"python": {"function": "no_such_module_here:f"}}, "python.function", "there is no module"),
        ({"python": {"function": "reward_module_that_raises:f"}}, "python.function", "ZeroDivisionError"),
        ({"python": {"function": "reward_module_that_lacks:f"}}, "python.function", "no_such_thing"),
        ({"python": {"function": "reward_functions_of_test:absent"}}, "python.function", "it has everything, huge"),
        ({"python": {"function": "reward_functions_of_test:value"}}, "python.function", "must name a function, got 3"),
        ({"python": {"function": "reward_functions_of_test:too_few"}}, "python.function", "unexpected keyword"),
    ],
)
def test_mistakes_are_told_by_field(code_dir: Path, reward: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        parts_of([{"name": "it", **reward}], code_dir)
    assert caught.value.field == f"spec.task.rewards.0.{field}"
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
