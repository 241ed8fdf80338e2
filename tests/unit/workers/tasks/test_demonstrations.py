"""The data set's answers as samples: their tokens are an engine's, and rows are chosen by what they earned."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError
from streamrl.spec.algorithm import SupervisedSpec
from streamrl_workers.generator.engines.requests import PromptTokens
from streamrl_workers.models.load import load_tokenizer
from streamrl_workers.scheduler.extensions.supervised import demonstrated_sample
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.stream.segments import context_ranges, trained_places
from streamrl_workers.tasks.dataset import TaskDataset, open_dataset
from streamrl_workers.tasks.protocol import prompt_row, result_of
from streamrl_workers.tasks.values import Demonstration, NeedPrompts, Prompt, Reference, Split
from support.chat_models import save_tokenizer
from support.speaking_models import CHATML, END, OTHER_END, WORDS, speaking_tokenizer
from support.supervised_jobs import ROWS, write_model, write_rows
from support.task_jobs import make_task

JSONL = {"jsonl": {"path": "rows.jsonl", "answerField": "completion"}}
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.content + '\\n' }}{% endfor %}"
PROMPT = NeedPrompts(split="train", first_index=0, count=1)
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
        assert (found.segments[0].text, found.truncated, found.reward) == (item.target, False, 0.0)


@pytest.mark.parametrize(
    ("template", "chat", "end"), [(CHATML, {}, END), (CHATML, None, OTHER_END), (PLAIN_TEMPLATE, {}, OTHER_END)]
)
def test_an_answer_ends_as_the_chat_template_ends_a_turn(
    template: str, chat: dict[str, Any] | None, end: str, tmp_path: Path
) -> None:
    """Without `chat`, or if the template names no end token, it ends with the tokenizer's."""
    speaking_tokenizer(template=template).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    rows = [{"prompt": "say:" * (1 + number % 9), "completion": "hello"} for number in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = make_task(dataset=JSONL, sampling={"maxTokens": 3}, **({} if chat is None else {"chat": chat}))
    opened = open_dataset(task, seed=0, base_dir=tmp_path, model_path=str(tmp_path), supervised=SupervisedSpec())
    found = shown(opened.only, 0)
    assert [WORDS[token] for token in unpack_int32(found.tokens)] == ["hel", "lo", end]
    assert (found.segments[0].text, found.truncated) == ("hello", False)


def test_under_chat_control_strings_of_rows_are_text(tmp_path: Path) -> None:
    row = {"prompt": "a<|im_end|>\n<|im_start|>system\nb", "completion": "<think>c</think><|im_start|>d"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 9 + '{"prompt": "x", "completion": "y"}\n')
    model = save_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    task = make_task(dataset=JSONL, chat={}, sampling={"maxTokens": 64})
    rows = open_dataset(task, seed=0, base_dir=tmp_path, model_path=model, supervised=SupervisedSpec())
    item = next(item for item in (rows.item("train", index) for index in range(9)) if item.answer != "y")
    found = rows.demonstration(item)
    assert found is not None
    tokenizer = load_tokenizer(model)
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    prompt, tokens = list(unpack_int32(found.prompt_tokens)), list(unpack_int32(found.tokens))
    assert [number for number in prompt if number in (start, end)] == [start, end, start]
    assert row["prompt"] in tokenizer.decode(prompt)
    assert start not in tokens
    assert tokenizer.decode(tokens[: len(row["completion"])]) == row["completion"] == found.segments[0].text


def test_a_long_answer_is_cut_and_has_no_end(base: Path) -> None:
    rows = opened(base, max_tokens=2)
    found = [shown(rows, index) for index in range(10)]
    assert {len(unpack_int32(one.tokens)) for one in found} == {2}
    assert {one.segments[0].text: one.truncated for one in found} == {
        one.segments[0].text: len(one.segments[0].text) >= 2 for one in found
    }


def test_the_text_of_a_cut_answer_is_that_of_its_tokens(base: Path) -> None:
    rows = opened(base, max_tokens=1)
    for index in range(10):
        assert shown(rows, index).segments[0].text == rows.item("train", index).target[:1]


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


def test_weights_leave_out_what_weighs_nothing_and_compare_what_is_left(base: Path, tmp_path: Path) -> None:
    rewards = {"1+1=": [0, 1, 2, 3], "2+2=": [0, 0, 4, 8], "3+3=": [1, 1], "4+4=": [5, 6]}
    rows = [
        {"prompt": prompt, "completion": str(number), "reward": reward}
        for prompt, earned in rewards.items()
        for number, reward in enumerate(earned)
    ]
    rows.append({"prompt": "4+4=", "completion": "9", "reward": None})  # nobody could score it
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def weights(**supervised: Any) -> dict[tuple[str, float], float]:
        task = make_task(dataset=JSONL, sampling={"maxTokens": 16})
        spec = SupervisedSpec.model_validate({"rewardField": "reward", "weights": {"dualGenerator": {}}} | supervised)
        opened = open_dataset(task, seed=0, base_dir=tmp_path, model_path=str(base / "model"), supervised=spec).only
        items = [opened.item("train", index) for index in range(20)]
        items += [opened.item("held_out", index) for index in range(opened.held_out_size or 0)]
        shown = [(item, opened.demonstration(item)) for item in items]
        return {(item.prompt, one.reward): one.weight for item, one in shown if one is not None}

    assert weights() == {
        ("1+1=", 2): 1,
        ("1+1=", 3): 1,
        ("2+2=", 4): 1,
        ("2+2=", 8): 1,
        ("3+3=", 1): 0.5,
        ("4+4=", 6): 1,
    }
    assert weights(minReward=1.0) == {
        ("1+1=", 2): 0.5,
        ("1+1=", 3): 1,
        ("2+2=", 8): 1,
        ("3+3=", 1): 0.5,
        ("4+4=", 6): 1,
    }


def test_with_a_critic_all_rows_are_trained_and_their_weights_are_the_trainers(base: Path) -> None:
    rows = opened(base, rewardField="reward", weights={"critic": {}})
    found = [shown(rows, index) for index in range(36)]
    assert {one.weight for one in found} == {1.0}
    assert {one.reward for one in found} == {0.0, 1.0}


TOKENS = {"answers": "Tokens"}
LOGGED = {"prompt_tokens": [3, 4, 5], "tokens": [6, 7, 8, 9, 10, 11], "finish_reason": "length"}
SEGMENTS = [
    {"tokens": 2, "observation": False, "context": False, "reward": 0.5},
    {"tokens": 1, "observation": True, "context": False, "reward": None},
    {"tokens": 1, "observation": False},
    {"tokens": 1, "observation": True, "context": True},
    {"tokens": 1, "reward": -1},
]


def logged(folder: Path, base: Path, *, dataset: dict[str, Any] = JSONL, **changed: Any) -> Demonstration:
    """Row 3 of a log of ten, changed; None leaves a field out."""
    rows = [{"prompt": f"{number}+", **LOGGED} for number in range(10)]
    rows[3] = {key: value for key, value in (rows[3] | changed).items() if value is not None}
    if "jsonl" in dataset:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pandas

        pandas.DataFrame(rows).to_parquet(folder / "rows.parquet")
    task = make_task(dataset=dataset, sampling={"maxTokens": 16})
    spec = SupervisedSpec.model_validate(TOKENS)
    opened = open_dataset(task, seed=0, base_dir=folder, model_path=str(base / "model"), supervised=spec).only
    opened.check()
    splits: list[tuple[Split, int]] = [("train", 9), ("held_out", opened.held_out_size or 0)]
    items = [opened.item(split, index) for split, size in splits for index in range(size)]
    found = opened.demonstration(next(item for item in items if item.prompt == "3+"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "dataset",
    [JSONL, {"huggingFace": {"path": "rows.parquet"}}],
    ids=["jsonl", "parquet"],
)
def test_a_log_of_several_turns_is_learnt_from_as_it_is(dataset: dict[str, Any], base: Path, tmp_path: Path) -> None:
    found = logged(tmp_path, base, dataset=dataset, segments=SEGMENTS)
    assert list(unpack_int32(found.prompt_tokens)) == LOGGED["prompt_tokens"]
    assert list(unpack_int32(found.tokens)) == LOGGED["tokens"]
    kinds = [(segment.tokens, segment.kind) for segment in found.segments]
    assert kinds == [(2, "turn"), (1, "observation"), (1, "turn"), (1, "context"), (1, "turn")]
    assert [segment.reward for segment in found.segments] == [0.5, None, None, None, -1.0]
    tokenizer = load_tokenizer(str(base / "model"))
    assert [segment.text for segment in found.segments] == [
        tokenizer.decode(part) for part in ([6, 7], [8], [9], [10], [11])
    ]
    assert found.truncated
    sample = demonstrated_sample(found, group_id=7, version=2)
    assert trained_places(sample) == [0, 1, 3, 5]
    assert context_ranges(sample) == [(0, 7), (7, 9)]
    assert [segment.reward for segment in sample.segments if segment.HasField("reward")] == [0.5, -1.0]
    row = prompt_row("3+", answer="3", metadata={"level": 1}, shown=found)
    assert result_of(PROMPT, json.loads(json.dumps(row)), rewards=()) == Prompt(
        split="train", index=0, text="3+", demonstration=found, reference=Reference("3", '{"level": 1}')
    )


def test_a_log_of_one_turn_needs_no_segments(base: Path, tmp_path: Path) -> None:
    found = logged(tmp_path, base, segments=[], finish_reason=None)
    assert [(segment.tokens, segment.kind) for segment in found.segments] == [(6, "turn")]
    assert not found.truncated
    assert not demonstrated_sample(found, group_id=0, version=0).segments


BAD_TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": None}, "tokens must be a list of token ids from 0 to"),
    "no prompt": ({"prompt_tokens": []}, "prompt_tokens must be a list of token ids from 0 to"),
    "another tokenizer": ({"tokens": [1, 90]}, "as this model's tokenizer has them, got [1, 90]"),
    "no numbers": ({"tokens": [1, True]}, "tokens must be a list of token ids"),
    "too many": ({"tokens": [1] * 17}, "tokens must be at most 16, which is spec.task.sampling.maxTokens, got 17"),
    "positions": ({"prompt_tokens": [1] * 30}, "must have at most 32 tokens, the model's positions, got '30 + 6'"),
    "no cover": ({"segments": [{"tokens": 5}]}, "segments must cover the 6 tokens, got 5"),
    "no segment": (
        {"segments": [6]},
        "each of segments must be an object with tokens, a number, and reward, if any, one from -1e+09 to 1e+09, got 6",
    ),
    "no reward": ({"segments": [{"tokens": 6, "reward": "1"}]}, "reward, if any, one from -1e+09 to 1e+09, got "),
    "true": ({"segments": [{"tokens": 6, "reward": True}]}, "reward, if any, one from -1e+09 to 1e+09, got "),
    "endless reward": (
        {"segments": [{"tokens": 6, "reward": 10**400}]},
        "reward, if any, one from -1e+09 to 1e+09, got ",
    ),
    "no context": (
        {"segments": [{"tokens": 0, "context": True}, {"tokens": 6}]},
        "segments with a context must have tokens",
    ),
    "nothing said": ({"segments": [{"tokens": 6, "observation": True}]}, "segments must hold tokens of the model"),
    "drawn anew": (
        {"resampled": True},
        "resampled must be false, since a turn drawn anew is no whole answer, got true",
    ),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_a_row_of_tokens_that_cannot_be_trained_is_named(name: str, base: Path, tmp_path: Path) -> None:
    changed, expected = BAD_TOKENS[name]
    with pytest.raises(UserError, match=r"rows\.jsonl line 4: ") as raised:
        logged(tmp_path, base, **changed)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_contexts_have_the_positions_for_themselves(base: Path, tmp_path: Path) -> None:
    prompt = [3] * 28
    with pytest.raises(UserError, match=r"got '28 \+ 6'"):
        logged(tmp_path, base, prompt_tokens=prompt)
    assert logged(tmp_path, base, prompt_tokens=prompt, segments=SEGMENTS).segments[3].kind == "context"
