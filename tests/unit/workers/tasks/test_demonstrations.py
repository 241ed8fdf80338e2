"""The data set's answers as samples: their tokens are an engine's, and rows are chosen by what they earned."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.spec.algorithm import SupervisedSpec
from streamrl_workers.generator.engines.requests import PromptTokens
from streamrl_workers.models.load import load_tokenizer
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.tasks.dataset import TaskDataset, open_dataset
from streamrl_workers.tasks.values import Demonstration
from support.supervised_jobs import ROWS, write_model, write_rows
from support.task_jobs import make_task

JSONL = {"jsonl": {"path": "rows.jsonl", "answerField": "completion"}}
PARQUET = {"huggingFace": {"path": "rows.parquet", "answerField": "completion"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import pandas

    folder = tmp_path_factory.mktemp("rows")
    write_model(folder)
    pandas.DataFrame(write_rows(folder)).to_parquet(folder / "rows.parquet")
    return folder


def opened(base: Path, *, dataset: dict[str, Any] = JSONL, max_tokens: int = 16, **supervised: Any) -> TaskDataset:
    task = make_task(dataset=dataset, sampling={"maxTokens": max_tokens})
    spec = SupervisedSpec.model_validate(supervised)
    return open_dataset(task, seed=0, base_dir=base, model_path=str(base / "model"), supervised=spec)


def shown(dataset: TaskDataset, index: int) -> Demonstration:
    found = dataset.demonstration(dataset.item("train", index))
    assert found is not None
    return found


@pytest.mark.parametrize("dataset", [JSONL, PARQUET], ids=["jsonl", "parquet"])
def test_tokens_are_those_of_an_engine_and_the_end_is_learned(dataset: dict[str, Any], base: Path) -> None:
    rows = opened(base, dataset=dataset)
    tokenizer = load_tokenizer(str(base / "model"))
    for index in range(5):
        item, found = rows.item("train", index), shown(rows, index)
        assert tuple(unpack_int32(found.prompt_tokens)) == PromptTokens(tokenizer).of(item.prompt)
        assert list(unpack_int32(found.tokens)) == [
            *PromptTokens(tokenizer).behind(item.target),
            tokenizer.eos_token_id,
        ]
        assert (found.text, found.truncated, found.reward) == (item.target, False, 0.0)


def test_a_long_answer_is_cut_and_has_no_end(base: Path) -> None:
    rows = opened(base, max_tokens=2)
    found = [shown(rows, index) for index in range(10)]
    assert {len(unpack_int32(one.tokens)) for one in found} == {2}
    assert {one.text: one.truncated for one in found} == {one.text: len(one.text) >= 2 for one in found}


def test_the_text_of_a_cut_answer_is_that_of_its_tokens(base: Path) -> None:
    rows = opened(base, max_tokens=1)
    for index in range(10):
        assert shown(rows, index).text == rows.item("train", index).target[:1]


@pytest.mark.parametrize("dataset", [JSONL, PARQUET], ids=["jsonl", "parquet"])
def test_rows_that_earned_less_are_in_neither_split(dataset: dict[str, Any], base: Path) -> None:
    rows = opened(base, dataset=dataset, rewardField="reward", minReward=1.0)
    both = [("train", index) for index in range(60)] + [("held_out", index) for index in range(rows.held_out_size or 0)]
    items = [rows.item(split, index) for split, index in both]  # type: ignore[arg-type] # their names
    assert {item.metadata["reward"] for item in items} == {1.0}
    assert len({item.prompt for item in items}) == ROWS // 2
    assert shown(rows, 0).reward == 1.0


def test_where_nothing_is_left_it_is_said(base: Path) -> None:
    with pytest.raises(UserError, match=r"leaves 0 rows to train on and 0 held out: both need one, got 2\.0; lower it"):
        opened(base, rewardField="reward", minReward=2.0)
    endless = {"reasoningGym": {"name": "chain_sum"}}
    with pytest.raises(UserError, match="minReward: needs a data set of rows: jsonl or huggingFace"):
        opened(base, dataset=endless, rewardField="reward", minReward=1.0)


def test_another_algorithms_items_are_no_samples(base: Path) -> None:
    dataset = open_dataset(make_task(dataset=JSONL), seed=0, base_dir=base)
    assert dataset.demonstration(dataset.item("train", 0)) is None
