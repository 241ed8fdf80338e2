"""The kinds of data sets by the key that users write; `open_dataset` is the door."""

from collections.abc import Callable
from pathlib import Path

from streamrl.spec.task import Chat, JsonlDataset, ReasoningGymDataset, Task
from streamrl_workers.tasks.chat import ChatTemplate, open_chat
from streamrl_workers.tasks.dataset import Source, TaskDataset, make_format


def _reasoning_gym(task: Task, *, seed: int, base_dir: Path) -> Source:
    from streamrl_workers.tasks.procedural import open_procedural

    del base_dir  # has no files
    assert isinstance(task.dataset.value, ReasoningGymDataset)
    return open_procedural(task.dataset.value, seed=seed)


def _jsonl(task: Task, *, seed: int, base_dir: Path) -> Source:
    from streamrl_workers.tasks.jsonl import open_jsonl

    assert isinstance(task.dataset.value, JsonlDataset)
    return open_jsonl(task.dataset.value, seed=seed, base_dir=base_dir)


def _hugging_face(task: Task, *, seed: int, base_dir: Path) -> Source:
    from streamrl_workers.tasks.huggingface import open_huggingface

    return open_huggingface(task, seed=seed, base_dir=base_dir)


DATASETS: dict[str, Callable[..., Source]] = {
    "reasoningGym": _reasoning_gym,
    "jsonl": _jsonl,
    "huggingFace": _hugging_face,
}


def open_dataset(task: Task, *, seed: int, base_dir: Path, model_path: str = "") -> TaskDataset:
    """Open the task's data set; makes one item of each split, so that what is wrong shows at once.

    Args:
        task: what the job says.
        seed: the job's.
        base_dir: where its paths begin.
        model_path: directory of the tokenizer whose chat template is used; "" = the run has none.

    Raises:
        UserError: the data set, its file, the format function or the chat template cannot be used.
    """
    chat = _open_chat(task.chat, model_path=model_path)
    source = DATASETS[task.dataset.key](task, seed=seed, base_dir=base_dir)
    dataset = TaskDataset(source, make_texts=make_format(task.format, base_dir=base_dir), chat=chat)
    dataset.item("train", 0)
    dataset.item("held_out", 0)
    return dataset


def _open_chat(chat: Chat | None, *, model_path: str) -> ChatTemplate | None:
    return None if chat is None else open_chat(chat, model_path=model_path)
