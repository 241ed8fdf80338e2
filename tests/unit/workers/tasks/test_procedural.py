"""Data sets of reasoning-gym: the same item again, no question in both splits, clear refusals."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl_workers.tasks.dataset import MixedDataset, open_dataset
from streamrl_workers.tasks.procedural import split_of
from support.task_jobs import CHAIN_SUM, make_task


def gym(name: str, **parameters: Any) -> dict[str, Any]:
    return {"reasoningGym": {"name": name, "parameters": parameters}}


def opened(dataset: dict[str, Any] = CHAIN_SUM, *, seed: int = 0) -> MixedDataset:
    return open_dataset(make_task(dataset=dataset), seed=seed, base_dir=Path())


# gsm_symbolic and list_functions fill a table of `size` rows when made, so they are addressed in another way.
@pytest.mark.parametrize("name", ["chain_sum", "pool_matrix", "gsm_symbolic", "list_functions", "knights_knaves"])
def test_an_item_is_made_again_by_another_opening_in_any_order(name: str) -> None:
    first, second = opened(gym(name), seed=3), opened(gym(name), seed=3)
    indexes = [0, 7, 123_456_789]
    assert [first.item("train", i) for i in indexes] == [second.item("train", i) for i in reversed(indexes)][::-1]


def test_seeds_and_splits_give_different_items() -> None:
    wide = gym("chain_sum", min_digits=8, max_digits=8)
    prompts = {
        opened(wide, seed=seed).item(split, index).prompt
        for seed in (0, 1, 2)
        for split in ("train", "held_out")
        for index in range(20)
    }
    assert len(prompts) == 3 * 2 * 20


def test_no_question_is_in_both_splits_though_few_exist() -> None:
    dataset = opened(gym("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1))
    train = {dataset.item("train", index).question for index in range(2000)}
    held_out = {dataset.item("held_out", index).question for index in range(500)}
    assert len(train) > 100
    assert len(held_out) > 20
    assert not train & held_out


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), index=st.integers(0, 2**40))
def test_every_item_belongs_to_its_split(seed: int, index: int) -> None:
    dataset = opened(seed=seed)
    for split in ("train", "held_out"):
        assert split_of(dataset.item(split, index).question) == split


def test_the_verifier_knows_the_right_answer() -> None:
    dataset = opened()
    one = dataset.item("held_out", 5)
    assert one.answer is not None
    assert dataset.only.verify(one.answer, one) == 1.0
    assert dataset.only.verify("none", one) == 0.0
    assert dataset.held_out_size is None


def test_answers_that_only_the_verifier_knows_are_absent() -> None:
    one = opened(gym("graph_color")).item("train", 0)
    assert one.answer is None
    assert one.target == ""


@pytest.mark.parametrize(
    ("dataset", "field", "text"),
    [
        (gym("chain_sums"), "name", "did you mean chain_sum"),
        (gym("qqqqqq"), "name", "must be a data set of reasoning-gym"),
        (gym("chain_sum", min_terms=5, max_terms=2), "parameters", "max_terms must be >= min_terms"),
        (gym("chain_sum", no_such=1), "parameters", "no_such"),
        (gym("chain_sum", min_terms="two"), "parameters", "TypeError"),
        (gym("chain_sum", size=5), "parameters.size", "is set by the job"),
        (gym("chain_sum", seed=5), "parameters.seed", "is set by the job"),
    ],
)
def test_refusals(dataset: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(dataset)
    assert caught.value.field == f"spec.task.dataset.reasoningGym.{field}"
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
