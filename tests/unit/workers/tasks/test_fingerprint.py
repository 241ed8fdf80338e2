"""The fingerprint of data: the same for the same questions, another one for other questions, of every kind of data set."""

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, load_dataset

from streamrl.spec.algorithm import SupervisedSpec
from streamrl_workers.tasks.dataset import open_dataset
from support.task_jobs import make_task, write_lines

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    return cache


def data_of(base_dir: Path, *, supervised: SupervisedSpec | None = None, **task: Any) -> dict[str, str]:
    return open_dataset(make_task(**task), seed=0, base_dir=base_dir, supervised=supervised).data


def on_disk(base_dir: Path, path: str = "data", **evaluation: Any) -> dict[str, str]:
    fields = {"path": path, "promptField": "prompt", "answerField": "answer"}
    return data_of(base_dir, dataset={"huggingFace": fields}, evaluation=evaluation)


def rows(first: int = 0) -> dict[str, list[str]]:
    return {name: [f"{name} {i}" for i in range(first, first + 20)] for name in ("prompt", "answer", "hint")}


def write_file(path: Path, table: dict[str, list[str]]) -> None:
    """One file of JSON lines."""
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(dict(zip(table, values, strict=True))) for values in zip(*table.values(), strict=True)]
    path.write_text("\n".join(lines))


def save_parquet(base: Path, table: dict[str, list[str]]) -> None:
    (base / "data").mkdir(exist_ok=True)
    Dataset.from_dict(table).to_parquet(base / "data" / "train.parquet")


def save_files(base: Path, table: dict[str, list[str]]) -> None:
    """Two files of one split, of which the second is the one that changes."""
    write_file(base / "data" / "train-0.jsonl", rows(500))
    write_file(base / "data" / "train-1.jsonl", table)


def save_one(base: Path, table: dict[str, list[str]]) -> None:
    Dataset.from_dict(table).save_to_disk(base / "data")


def test_a_file_of_lines_is_known_by_its_rows_and_its_hash(tmp_path: Path) -> None:
    lines, file = write_lines(tmp_path / "a.jsonl", count=50), tmp_path / "a.jsonl"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert data_of(tmp_path, dataset=lines) == {
        "spec.task.dataset": f"45 rows to train on, 5 held out, sha256 {digest[:16]}"
    }
    file.rename(tmp_path / "moved.jsonl")
    assert data_of(tmp_path, dataset={"jsonl": {"path": "moved.jsonl"}}) == data_of(
        tmp_path, dataset=write_lines(file, count=50)
    )


def test_one_byte_of_the_metadata_is_another_fingerprint(tmp_path: Path) -> None:
    """Rewards and format functions read it, though no prompt differs."""
    write_file(tmp_path / "a.jsonl", rows())
    before = data_of(tmp_path, dataset={"jsonl": {"path": "a.jsonl"}})
    write_file(tmp_path / "a.jsonl", rows() | {"hint": rows()["hint"][::-1]})
    after = data_of(tmp_path, dataset={"jsonl": {"path": "a.jsonl"}})
    assert before != after
    assert [text.rpartition(" ")[0] for text in before.values()] == [text.rpartition(" ")[0] for text in after.values()]


def test_rows_that_are_left_out_are_none_of_a_supervised_runs_data(tmp_path: Path) -> None:
    table = rows() | {"reward": [str(i) for i in range(20)]}
    write_file(tmp_path / "a.jsonl", table)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace('"reward": "', '"reward": ').replace('"}', "}"))
    lines: dict[str, Any] = {"jsonl": {"path": "a.jsonl", "heldOutPercent": 50}}
    all_of_them, best = (
        data_of(tmp_path, dataset=lines, supervised=SupervisedSpec(rewardField="reward", minReward=least))
        for least in (None, 3.0)
    )
    assert all_of_them != best


@pytest.mark.parametrize("save", [save_parquet, save_files, save_one])
def test_other_files_are_another_fingerprint(
    tmp_path: Path, save: Callable[[Path, dict[str, list[str]]], None]
) -> None:
    found = []
    for name, table in (("one", rows()), ("same", rows()), ("other", rows(1))):
        (tmp_path / name).mkdir()
        save(tmp_path / name, table)
        found.append(on_disk(tmp_path / name))
    assert found[0] == found[1] != found[2]


def test_a_single_file_has_the_hash_of_that_file(tmp_path: Path) -> None:
    save_parquet(tmp_path, rows())
    digest = hashlib.sha256((tmp_path / "data" / "train.parquet").read_bytes()).hexdigest()[:16]
    assert on_disk(tmp_path, "data/train.parquet") == on_disk(tmp_path)
    assert on_disk(tmp_path)["spec.task.dataset"].endswith(f"held out, sha256 {digest}")


def test_only_the_splits_that_are_read_count(tmp_path: Path) -> None:
    found = []
    for test, other in ((0, 0), (0, 1), (1, 0)):
        splits = {"train": rows(100), "test": rows(test), "other": rows(other)}
        base = tmp_path / f"{test}{other}"
        DatasetDict({name: Dataset.from_dict(table) for name, table in splits.items()}).save_to_disk(base / "data")
        found.append(on_disk(base, split="test"))
    assert found[0] == found[1] != found[2]


def test_a_data_set_of_the_hub_is_known_by_its_commit(tmp_path: Path, own_cache: Path) -> None:
    """As the library has it in its cache, where it keeps what it has fetched."""
    write_file(tmp_path / "words" / "train.jsonl", rows())
    load_dataset(str(tmp_path / "words"))
    (built,) = (path.parent for path in own_cache.glob("words/default/*/*/dataset_info.json"))
    built.rename(built.with_name(COMMIT))
    (own_cache / "words").rename(own_cache / "team___words")
    fields = {"name": "team/words", "answerField": "answer"}
    data = data_of(tmp_path, dataset={"huggingFace": fields})
    assert data == {"spec.task.dataset": f"18 rows to train on, 2 held out, revision {COMMIT}"}


def test_a_procedural_data_set_is_known_by_what_its_entries_follow_from(tmp_path: Path) -> None:
    sums = {"reasoningGym": {"name": "chain_sum", "parameters": {"min_terms": 2, "max_terms": 2}}}
    package = f"reasoning-gym {version('reasoning-gym')}"
    text = f'chain_sum {{"max_terms": 2, "min_terms": 2}} of {package}'
    assert data_of(tmp_path, dataset=sums) == {"spec.task.dataset": text}


def test_a_mixture_has_all_data_sets_and_their_weights(tmp_path: Path) -> None:
    tasks = [
        {"name": name, "weight": weight, "dataset": write_lines(tmp_path / f"{name}.jsonl", count=count), "rewards": []}
        for name, weight, count in (("a", 3, 20), ("b", 1, 30))
    ]
    for task in tasks:
        task["rewards"] = [{"name": "answer", "exactMatch": {}}]
    data = data_of(tmp_path, mixture=tasks)
    assert data.keys() == {"spec.task.mixture[0].dataset", "spec.task.mixture[1].dataset", "spec.task.mixture"}
    assert data["spec.task.mixture[1].dataset"].startswith("27 rows to train on, 3 held out, sha256 ")
    assert data["spec.task.mixture"] == "weights 3, 1"
