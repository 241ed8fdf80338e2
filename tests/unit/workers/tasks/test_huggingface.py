"""Data sets of Hugging Face from disk: every layout, splits, order, what rows become, and every kind of bad data."""

import datetime
import json
import math
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from pyarrow import parquet

from streamrl.errors import UserError
from streamrl_workers.tasks.dataset import MixedDataset, open_dataset
from support.task_jobs import make_task
from support.tree import ROOT

COUNT = 50


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


def rows(count: int = COUNT, *, first: int = 0) -> dict[str, list[Any]]:
    numbers = range(first, first + count)
    return {
        "question": [f"{i}+1=" for i in numbers],
        "answer": [f"so #### {i + 1}" for i in numbers],
        "level": [i % 3 for i in numbers],
    }


def opened(base_dir: Path, *, seed: int = 0, evaluation: dict[str, Any] | None = None, **options: Any) -> MixedDataset:
    fields = {"path": "data", "promptField": "question", "answerField": "answer"} | options
    dataset = {"huggingFace": {key: value for key, value in fields.items() if value is not None}}
    return open_dataset(make_task(dataset=dataset, evaluation=evaluation or {}), seed=seed, base_dir=base_dir)


def prompts(dataset: MixedDataset, split: Any, count: int) -> list[str]:
    return [dataset.item(split, index).prompt for index in range(count)]


def save_one(directory: Path) -> None:
    Dataset.from_dict(rows()).save_to_disk(directory)


def save_splits(directory: Path) -> None:
    splits = {"train": Dataset.from_dict(rows()), "test": Dataset.from_dict(rows(5, first=100))}
    DatasetDict(splits).save_to_disk(directory)


def save_parquet(directory: Path) -> None:
    directory.mkdir()
    Dataset.from_dict(rows()).to_parquet(directory / "train.parquet")


def save_jsonl(directory: Path) -> None:
    directory.mkdir()
    table = rows()
    lines = [json.dumps({key: table[key][i] for key in table}) for i in range(COUNT)]
    (directory / "train.jsonl").write_text("\n".join(lines))


def save_csv(directory: Path) -> None:
    directory.mkdir()
    Dataset.from_dict(rows()).to_csv(directory / "train.csv")


@pytest.mark.parametrize("save", [save_one, save_splits, save_parquet, save_jsonl, save_csv])
def test_every_layout_gives_the_same_rows(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "data")
    dataset = opened(tmp_path)
    assert dataset.held_out_size == 5
    train, held_out = prompts(dataset, "train", 45), prompts(dataset, "held_out", 5)
    assert sorted(train + held_out) == sorted(rows()["question"])
    item = dataset.item("train", 7)
    number = item.source_index
    assert (item.question, item.answer, dict(item.metadata)) == (
        f"{number}+1=",
        f"so #### {number + 1}",
        {"level": number % 3},
    )


@pytest.mark.parametrize("save", [save_parquet, save_jsonl, save_csv])
def test_a_single_file_will_do(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "data")
    (file,) = (tmp_path / "data").iterdir()
    assert prompts(opened(tmp_path, path=f"data/{file.name}"), "train", 5) == prompts(opened(tmp_path), "train", 5)


@pytest.mark.parametrize(
    "answers", [["007", "1e3", "72.0", "+5", " 6 "], ["True", "False", "true"], ["0x1F", "no", "1_000"]]
)
@pytest.mark.parametrize("path", ["data/train.csv", "data"])
def test_texts_of_a_csv_file_stay_as_they_are(tmp_path: Path, path: str, answers: list[str]) -> None:
    """Also where all cells of a column look like numbers."""
    (tmp_path / "data").mkdir()
    lines = [f"{number}00,{answer},{number}" for number, answer in enumerate(answers, start=1)]
    (tmp_path / "data" / "train.csv").write_text("question,answer,level\n" + "\n".join(lines) + "\n")
    dataset = opened(tmp_path, path=path)
    items = [dataset.item("train", index) for index in range(len(answers) - 1)]
    items += [dataset.item("held_out", 0)]
    found = {item.source_index: (item.question, item.answer, dict(item.metadata)) for item in items}
    assert found == {n: (f"{n + 1}00", answer, {"level": n + 1}) for n, answer in enumerate(answers)}


@pytest.mark.parametrize("row", ["one,", ",1"])
def test_an_empty_cell_of_a_csv_file_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "train.csv").write_text(f"question,answer\ntwo,2\n{row}\n")
    with pytest.raises(UserError, match=r"row 1 of train: (question|answer)"):
        opened(tmp_path, path="train.csv")


def test_a_split_for_evaluation_is_taken_whole_and_its_prompts_leave_the_training_split(tmp_path: Path) -> None:
    train, test = rows(20), rows(10, first=15)
    DatasetDict({"train": Dataset.from_dict(train), "test": Dataset.from_dict(test)}).save_to_disk(tmp_path / "data")
    dataset = opened(tmp_path, evaluation={"split": "test"})
    assert dataset.held_out_size == 10
    assert prompts(dataset, "held_out", 10) == test["question"]
    assert sorted(prompts(dataset, "train", 15)) == sorted(train["question"][:15])
    assert set(prompts(dataset, "train", 30)) == set(train["question"][:15])


def test_numbers_become_texts_and_metadata_is_what_json_carries(tmp_path: Path) -> None:
    table = {
        "question": [1, 2, 3],
        "answer": [0.5, 1.0, 2.0],
        "day": [datetime.datetime(2026, 1, 2)] * 3,
        "blob": [b"\x00"] * 3,
        "nested": [{"a": [1.0, float("nan")], "b": b"x"}] * 3,
        "none": [None] * 3,
    }
    Dataset.from_dict(table).save_to_disk(tmp_path / "data")
    item = opened(tmp_path).item("train", 0)
    assert item.prompt in {"1", "2", "3"}
    assert item.answer in {"0.5", "1", "2"}
    assert item.metadata == {"day": "2026-01-02 00:00:00", "nested": {"a": [1.0, None]}, "none": None}
    json.dumps(item.metadata, allow_nan=False)


NUMBERS = ["72", "0.5", "18.50", "1e-5", "-3", "1E3", "0.1000000000000000055"]


def save_numbers(directory: Path, *, file: str, pattern: str, joint: str) -> None:
    directory.mkdir()
    records = [f'{{"question": "q{i}", "answer": {number}}}' for i, number in enumerate(NUMBERS)]
    (directory / file).write_text(pattern % joint.join(records))


def answers(dataset: MixedDataset) -> dict[str, str | None]:
    """By question."""
    items = [dataset.item("train", index) for index in range(10)]  # more than there are: they come again
    items += [dataset.item("held_out", index) for index in range(dataset.held_out_size or 0)]
    return {item.question: item.answer for item in items}


@pytest.mark.parametrize(
    ("path", "file", "pattern", "joint"),
    [
        ("data", "train.jsonl", "%s", "\n"),
        ("data/train.jsonl", "train.jsonl", "\ufeff%s\n\n", "\n\n"),
        ("data/train.json", "train.json", "[%s]", ",\n"),
    ],
)
def test_numbers_of_a_local_json_file_keep_their_text(
    tmp_path: Path, path: str, file: str, pattern: str, joint: str
) -> None:
    save_numbers(tmp_path / "data", file=file, pattern=pattern, joint=joint)
    found = answers(opened(tmp_path, path=path))
    assert found == {f"q{i}": number for i, number in enumerate(NUMBERS)}


def test_a_column_of_numbers_and_texts_keeps_its_text(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        '{"question": "a", "answer": 1.50}\n{"question": "b", "answer": "x"}\n{"question": "c", "answer": 3}\n'
    )
    assert answers(opened(tmp_path, path="data.jsonl")) == {"a": "1.50", "b": "x", "c": "3"}


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_numbers_of_arrow_have_their_shortest_form(tmp_path: Path, kind: pa.DataType) -> None:
    import numpy as np

    values = np.array([0.1, 72, -0.5, 2048], dtype=kind.to_pandas_dtype())
    table = pa.table({"question": list("abcd"), "answer": pa.array(values, type=kind)})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert answers(opened(tmp_path, path="rows.parquet")) == {"a": "0.1", "b": "72", "c": "-0.5", "d": "2048"}


def save_classes(directory: Path, *, numbers: list[int | None]) -> None:
    features = Features({"question": Value("string"), "answer": ClassLabel(names=["no", "yes"])})
    table = {"question": [f"q{i}" for i in range(len(numbers))], "answer": numbers}
    Dataset.from_dict(table, features=features).save_to_disk(directory)


def test_a_class_becomes_its_name(tmp_path: Path) -> None:
    save_classes(tmp_path / "data", numbers=[1, 0, 1])
    assert answers(opened(tmp_path)) == {"q0": "yes", "q1": "no", "q2": "yes"}


@pytest.mark.parametrize("number", [-1, None])
def test_a_row_without_a_class_is_refused(tmp_path: Path, number: int | None) -> None:
    save_classes(tmp_path / "data", numbers=[1, number, 0])
    with pytest.raises(UserError, match="answerField: row 1 of train: answer must be a text or a number"):
        opened(tmp_path)


def test_without_an_answer_field_there_is_no_answer(tmp_path: Path) -> None:
    save_one(tmp_path / "data")
    item = opened(tmp_path, answerField=None).item("train", 0)
    assert item.answer is None
    assert "answer" in item.metadata


_FORKING = """
import os, sys
from pathlib import Path
from streamrl_workers.tasks.dataset import open_dataset
from support.task_jobs import make_task
from support.tree import ROOT

fields = {"path": "data", "promptField": "question", "answerField": "answer"}
task = make_task(dataset={"huggingFace": fields}, evaluation={})
dataset = open_dataset(task, seed=0, base_dir=Path(sys.argv[1]))
if os.fork() == 0:
    print(*(dataset.item("train", index).prompt for index in range(45)), sep="\\n", flush=True)
    os._exit(0)
os.wait()
"""


def test_a_fork_reads_what_its_parent_opened(tmp_path: Path) -> None:
    """In a process of its own, as the fork server is one: this one has threads of other tests."""
    save_parquet(tmp_path / "data")
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _FORKING, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.splitlines() == prompts(opened(tmp_path), "train", 45), done.stderr


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": "nowhere"}, "path: must be a directory or a file"),
        ({"split": "trian"}, "split: the data set has no split trian; its splits are train, test"),
        (
            {"evaluation": {"split": "dev"}},
            "evaluation.split: the data set has no split dev; its splits are train, test",
        ),
        ({"evaluation": {"split": "train"}}, "evaluation.split: must differ"),
        ({"promptField": "prompt"}, "promptField: train has no column prompt; its columns are question, answer, level"),
        ({"answerField": "a"}, "answerField: train has no column a; its columns are question, answer, level"),
        ({"revision": "main"}, "revision: goes with name"),
        ({"config": "main"}, "config: goes with name"),
    ],
)
def test_what_is_not_there_is_one_line_with_what_is(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    save_splits(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        opened(tmp_path, **options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "values", "text"),
    [
        ("question", ["a", "  "], "promptField: row 1 of train: question must not be empty"),
        ("question", ["a", None], "promptField: row 1 of train: question must be a text or a number"),
        ("question", [["a"], ["b"]], "promptField: row 0 of train: question must be a text or a number, got ['a']"),
        ("question", [True, False], "promptField: row 0 of train: question must be a text or a number, got true"),
        ("answer", ["a", None], "answerField: row 1 of train: answer must be a text or a number"),
        ("answer", [1.5, math.nan], "answerField: row 1 of train: answer must be a text or a number"),
        ("answer", [math.inf, 1.5], "answerField: row 0 of train: answer must be a text or a number"),
        ("question", ["same", "same"], "must hold at least two different prompts"),
    ],
)
def test_a_bad_row_is_one_line_with_its_number(tmp_path: Path, column: str, values: list[Any], text: str) -> None:
    count = len(values)
    table = {"question": [f"q{i}" for i in range(count)], "answer": ["x"] * count} | {column: values}
    Dataset.from_dict(table).save_to_disk(tmp_path / "data")
    with pytest.raises(UserError) as caught:
        opened(tmp_path)
    assert text in str(caught.value)


def test_a_text_that_is_not_utf8_is_one_line_with_its_rows(tmp_path: Path) -> None:
    offsets = pa.py_buffer(array("i", [0, 2, 5]).tobytes())
    texts = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ok\xed\xa0\x80")])
    parquet.write_table(pa.table({"question": texts, "answer": ["x", "y"]}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="path: a text of rows 0 to 999 of train must be UTF-8"):
        opened(tmp_path, path="rows.parquet")


def test_a_training_split_that_is_held_out_whole_is_refused(tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_dict(rows(5)), "test": Dataset.from_dict(rows(9))}).save_to_disk(
        tmp_path / "data"
    )
    with pytest.raises(UserError, match="every prompt of train is also one of test, which is held out"):
        opened(tmp_path, evaluation={"split": "test"})


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl", "train.csv"])
def test_a_broken_file_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'\x00\xff{"question": ')
    with pytest.raises(UserError, match=r"path: cannot be loaded|has no column") as caught:
        opened(tmp_path, path=name)
    assert "\n" not in str(caught.value)


def test_a_split_without_rows_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("question,answer\n")
    with pytest.raises(UserError, match="corresponds to no data"):
        opened(tmp_path, path="empty.csv")


def test_a_directory_without_data_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="path: cannot be loaded"):
        opened(tmp_path)


def test_the_code_of_a_data_set_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match="path: cannot be loaded"):
        opened(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_name_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="name: cannot be loaded") as caught:
        opened(tmp_path, path=None, name="nobody/nothing")
    assert "\n" not in str(caught.value)
