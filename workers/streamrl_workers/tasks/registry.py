"""The kinds of data sets by the key that users write; `open_dataset` is the door."""

from collections.abc import Callable
from pathlib import Path

from streamrl.spec.task import JsonlDataset, ReasoningGymDataset, Task
from streamrl_workers.tasks.dataset import Source, TaskDataset, make_format


def _reasoning_gym(options: ReasoningGymDataset, *, seed: int, base_dir: Path) -> Source:
    from streamrl_workers.tasks.procedural import open_procedural

    del base_dir  # has no files
    return open_procedural(options, seed=seed)


def _jsonl(options: JsonlDataset, *, seed: int, base_dir: Path) -> Source:
    from streamrl_workers.tasks.jsonl import open_jsonl

    return open_jsonl(options, seed=seed, base_dir=base_dir)


DATASETS: dict[str, Callable[..., Source]] = {
    "reasoningGym": _reasoning_gym,
    "jsonl": _jsonl,
}


def open_dataset(task: Task, *, seed: int, base_dir: Path) -> TaskDataset:
    """Open the task's data set; makes one item of each split, so that what is wrong shows at once.

    Raises:
        UserError: the data set, its file or the format function cannot be used.
    """
    source = DATASETS[task.dataset.key](task.dataset.value, seed=seed, base_dir=base_dir)
    dataset = TaskDataset(source, make_texts=make_format(task.format, base_dir=base_dir))
    dataset.item("train", 0)
    dataset.item("held_out", 0)
    return dataset
