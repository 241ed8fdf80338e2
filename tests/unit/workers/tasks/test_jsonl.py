"""JSONL data sets: split, order, epochs, and every kind of bad file; the format function."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl_workers.tasks.dataset import MixedDataset, open_dataset
from support.task_jobs import VERIFIER, make_task, write_lines


def opened(base_dir: Path, *, seed: int = 0, **task: Any) -> MixedDataset:
    return open_dataset(make_task(**task), seed=seed, base_dir=base_dir)


def test_each_pass_has_every_train_line_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    dataset = opened(tmp_path, dataset=write_lines(tmp_path / "a.jsonl", count=50))
    assert dataset.held_out_size == 5
    passes = [[dataset.item("train", 45 * epoch + i).prompt for i in range(45)] for epoch in range(3)]
    assert len({tuple(sorted(one)) for one in passes}) == 1
    assert len({tuple(one) for one in passes}) == 3
    held_out = {dataset.item("held_out", i).prompt for i in range(5)}
    assert len(held_out) == 5
    assert not held_out & set(passes[0])


def test_the_same_seed_gives_the_same_items(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", count=30)
    one, same, other = (opened(tmp_path, dataset=lines, seed=seed) for seed in (1, 1, 2))
    indexes = [100, 3, 55, 3]
    assert [one.item("train", i) for i in indexes] == [same.item("train", i) for i in indexes]
    assert [one.item("train", i) for i in range(20)] != [other.item("train", i) for i in range(20)]
    assert one.item("held_out", 2) == other.item("held_out", 2)


@settings(max_examples=40, deadline=None)
@given(prompts=st.lists(st.text(min_size=1, max_size=3), min_size=2, max_size=60), percent=st.integers(1, 90))
def test_equal_prompts_share_a_split(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], percent: int
) -> None:
    import json

    base_dir = tmp_path_factory.mktemp("lines")
    (base_dir / "a.jsonl").write_text("\n".join(json.dumps({"prompt": p, "answer": ""}) for p in prompts))
    dataset = {"jsonl": {"path": "a.jsonl", "heldOutPercent": percent}}
    try:
        data = opened(base_dir, dataset=dataset)
    except UserError as error:
        assert "two different prompts" in str(error)
        return
    size = data.held_out_size or 0
    held_out = Counter(data.item("held_out", i).prompt for i in range(size))
    train = Counter(data.item("train", i).prompt for i in range(len(prompts) - size))
    assert held_out + train == Counter(prompts)
    assert not set(held_out) & set(train)


def test_fields_blank_lines_and_numbers(tmp_path: Path) -> None:
    text = '\ufeff{"q": "1+1", "a": 2, "level": 3}\n\n  \r\n{"q": "2+2", "a": "4"}'
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8", newline="")
    data = opened(tmp_path, dataset={"jsonl": {"path": "a.jsonl", "promptField": "q", "answerField": "a"}})
    items = {one.source_index: one for one in (data.item("train", 0), data.item("held_out", 0))}
    assert sorted(items) == [0, 3]
    assert (items[0].answer, items[0].metadata) == ("2", {"level": 3})
    assert data.only.verify(" 4 ", items[3]) == 1.0
    assert data.only.verify("5", items[3]) == 0.0


def test_numbers_keep_their_text(tmp_path: Path) -> None:
    numbers = ["72", "72.0", "1e-5", "0.50", "123456789012345678901234567890"]
    lines = [f'{{"prompt": {number}, "answer": {number}, "level": 1.50}}' for number in numbers]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = opened(tmp_path, dataset={"jsonl": {"path": "a.jsonl"}})
    items = [data.item("train", index) for index in range(4)] + [data.item("held_out", 0)]
    assert sorted((item.prompt, item.answer) for item in items) == sorted(zip(numbers, numbers, strict=True))
    assert [item.metadata for item in items] == [{"level": 1.5}] * 5


GOOD = b'{"prompt": "a", "answer": "b"}\n'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file"),
        (b"", "at least one line"),
        (b"\n\n", "at least one line"),
        (GOOD + b"{bad\n", "line 2 must be JSON"),
        (GOOD + b"[1]\n", "line 2 must be an object, got [1]"),
        (GOOD + b'{"prompt": "x"}\n', "line 2 has no field answer; its fields are prompt"),
        (GOOD + b'{"answer": "x"}\n', "line 2 has no field prompt"),
        (GOOD + b'{"prompt": null, "answer": "x"}\n', "prompt must be a text or a number"),
        (GOOD + b'{"prompt": "", "answer": "x"}\n', "prompt must not be empty"),
        (GOOD + b'{"prompt": "x", "answer": ["x"]}\n', "answer must be a text or a number"),
        (GOOD + b'{"prompt": "x", "answer": NaN}\n', "answer must be a text or a number"),
        (GOOD + b'{"prompt": "x", "answer": 1e999}\n', "answer must be a text or a number"),
        (GOOD + b'{"prompt": "\xff", "answer": "x"}\n', "line 2 must be UTF-8"),
        (GOOD + b'{"prompt": "\\ud800 hello", "answer": "x"}\n', "line 2 must be UTF-8: surrogates not allowed"),
        (GOOD + b'{"prompt": "x", "answer": "\\uDFFF"}\n', "line 2 must be UTF-8: surrogates not allowed"),
        (GOOD + b'{"prompt": "x", "answer": "x", "hint": ["\\ud800"]}\n', "line 2 must be UTF-8"),
        (GOOD + b'{"prompt": "x", "answer": 1' + b"0" * 5000 + b"}\n", "line 2 must be JSON: Exceeds the limit"),
        (GOOD + GOOD, "two different prompts"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes | None, text: str) -> None:
    if content is not None:
        (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError) as caught:
        opened(tmp_path, dataset={"jsonl": {"path": "a.jsonl"}})
    assert text in str(caught.value)
    assert caught.value.field.startswith("spec.task.dataset.jsonl.")
    assert "\n" not in str(caught.value)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a regular file"):
        opened(tmp_path, dataset={"jsonl": {"path": "."}})


FORMATS = """
def good(*, question, answer, metadata):
    return {"prompt": f"Q {question}", "target": f"A {answer} level {metadata['level']}"}

def raises(*, question, answer, metadata):
    raise KeyError("no")

def text(*, question, answer, metadata):
    return question

def empty(*, question, answer, metadata):
    return {"prompt": "", "target": ""}

def late(*, question, answer, metadata):
    return {"prompt": question, "target": {0: answer, 2: answer}[metadata["level"]]}

def half(*, question, answer, metadata):
    return {"prompt": "\\ud800", "target": ""}

def half_target(*, question, answer, metadata):
    return {"prompt": question, "target": "\\ud800"}
"""


def test_the_format_function_makes_prompt_and_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "formats_of_test.py").write_text(FORMATS)
    lines = write_lines(tmp_path / "a.jsonl", count=9)
    one = opened(tmp_path, dataset=lines, format={"function": "formats_of_test:good"}).item("train", 0)
    assert one.prompt == f"Q {one.question}"
    assert one.target == f"A {one.answer} level {one.metadata['level']}"
    refused = {"raises": "raised KeyError", "text": "must return", "empty": "must return"}
    for name, text in (refused | {"half": "must be UTF-8", "half_target": "must be UTF-8"}).items():
        with pytest.raises(UserError, match=text):
            opened(tmp_path, dataset=lines, format={"function": f"formats_of_test:{name}"})


def test_what_fails_later_is_named_where_the_mixture_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "formats_of_test.py").write_text(FORMATS)
    lines = write_lines(tmp_path / "a.jsonl", count=9)
    tasks = [
        {"name": name, "dataset": lines, "rewards": [VERIFIER], "format": {"function": f"formats_of_test:{function}"}}
        for name, function in (("first", "good"), ("second", "late"))
    ]
    dataset = opened(tmp_path, mixture=tasks)
    with pytest.raises(UserError, match=r"raised KeyError") as refused:
        for index in range(20):
            dataset.item("train", index)
    assert refused.value.field == "spec.task.mixture[1].format"
