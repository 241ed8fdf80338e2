"""A data set as the rest sees it: items by (split, index), made again at any time from these and the seed alone.

A source (one file for each kind, `DATASETS` names them) gives questions; this file adds the user's format and the chat
template, and mixes the tasks of a job (`streamrl/mixture.py`). `open_dataset` is the door. It does not score.

Invariants:
- No question of one split is a question of the other. A row of a finite data set is held out by the hash of its prompt; the
  share is `percent` of the rows (at least one), a little more where a prompt at the edge occurs many times.
- Train item i of n rows is row `permutation(seed, i // n)[i % n]`: every row once in each pass, each pass in its own order.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from streamrl.errors import UserError
from streamrl.spec.algorithm import SupervisedSpec
from streamrl.spec.base import PythonFunction
from streamrl.spec.task import SingleTask, Task
from streamrl.spec.tasks.datasets import JsonlDataset, ReasoningGymDataset
from streamrl_workers.rewards.base import Item, load_function
from streamrl_workers.tasks.chat import ChatTemplate, open_chat
from streamrl_workers.tasks.questions import Question, RowSource, hash_of
from streamrl_workers.tasks.supervised.demonstrations import Demonstrations, open_demonstrations
from streamrl_workers.tasks.supervised.row_rewards import FIELD as SUPERVISED_FIELD
from streamrl_workers.tasks.supervised.row_rewards import RowRewards
from streamrl_workers.tasks.values import Demonstration, Split

FORMAT_FIELD = "spec.task.format"
FORMAT_KEYWORDS = ("question", "answer", "metadata")


class QuestionSource(Protocol):
    """One kind of data set."""

    @property
    def held_out_size(self) -> int | None:
        """Held-out items; None = endless."""

    def question(self, split: Split, index: int) -> Question:
        """Question `index` >= 0 of a split; held-out indexes are below `held_out_size`."""

    @property
    def train_size(self) -> int | None:
        """Train items of a pass; None = endless."""

    @property
    def data(self) -> str:
        """What the questions are made of, in a line: another line, other questions."""

    def place(self, source_index: int) -> str:
        """Where a person finds the item, for errors."""

    def verify(self, answer: str, item: Item) -> float:
        """The data set's own verdict on an answer."""


Format = Callable[[Question], tuple[str, str]]
"""question -> (prompt, target)"""


class TaskDataset:
    """A source, the user's format, and the chat template around what it gives."""

    def __init__(
        self,
        source: QuestionSource,
        *,
        make_texts: Format,
        chat: ChatTemplate | None = None,
        demonstrations: Demonstrations | None = None,
        rewards: RowRewards | None = None,
    ) -> None:
        """`demonstrations` and `rewards`: of a supervised job's rows."""
        self._source = source
        self._demonstrations = demonstrations
        self._rewards = rewards
        self._make_texts = make_texts
        self.chat = chat
        """None: prompts are plain text."""
        self.verify = source.verify

    @property
    def held_out_size(self) -> int | None:
        """Held-out items; None = endless."""
        return self._source.held_out_size

    @property
    def data(self) -> str:
        """What the questions are made of, in a line."""
        return self._source.data

    def question(self, split: Split, index: int) -> Question:
        """Question `index` of a split, before the user's format."""
        return self._source.question(split, index)

    def item(self, split: Split, index: int) -> Item:
        """Item `index` of a split. Raises `UserError` if the user's format function or the chat template fails on it."""
        question = self._source.question(split, index)
        prompt, target = self._make_texts(question)
        return Item(
            prompt=_encodable(prompt if self.chat is None else self.chat.prompt(prompt)),
            target=_encodable(target),
            question=question.question,
            answer=question.answer,
            metadata=question.metadata,
            source_index=question.source_index,
        )

    def demonstration(self, item: Item) -> Demonstration | None:
        """The item's answer as a sample, of a supervised job. Raises `UserError` if it cannot be trained."""
        if self._demonstrations is None or self._rewards is None:
            return None
        reward, weight = self._rewards.reward(item), self._rewards.weight(item)
        place = self._source.place(item.source_index)
        return self._demonstrations.of(item, place=place, reward=reward, weight=weight)

    def check(self) -> None:
        """Make each item once, if their number is finite. Raises `UserError` as `item` and `demonstration`."""
        sizes: dict[Split, int | None] = {"train": self._source.train_size, "held_out": self._source.held_out_size}
        for split, size in sizes.items():
            for index in range(size or 0):
                self.demonstration(self.item(split, index))


class MixedDataset:
    """The data sets of a job's tasks, in the shares of the mixture; mostly there is one."""

    def __init__(self, tasks: Sequence[TaskDataset], *, of: Task) -> None:
        """`of`: what the job says of each of `tasks`, and which item is of which."""
        self.tasks = tuple(tasks)
        self.shares = of.shares
        self._said = of.tasks

    @property
    def only(self) -> TaskDataset:
        """Of a job of one task, as those with agents are."""
        [task] = self.tasks
        return task

    @property
    def data(self) -> dict[str, str]:
        """What the questions are made of, by the field that says where they come from."""
        data = {f"{said.field}.dataset": task.data for said, task in zip(self._said, self.tasks, strict=True)}
        weights = ", ".join(str(said.weight) for said in self._said)
        return data | ({"spec.task.mixture": f"weights {weights}"} if len(self._said) > 1 else {})

    @property
    def held_out_size(self) -> int | None:
        """Held-out items, until the first task has no more; None = endless."""
        return self.shares.size([task.held_out_size for task in self.tasks])

    def question(self, split: Split, index: int) -> Question:
        """Question `index` of a split, before the user's format."""
        task, own = self.shares.place(index)
        return self.tasks[task].question(split, own)

    def item(self, split: Split, index: int) -> Item:
        """Item `index` of a split. Raises as that of its task, with the field where the job has it."""
        task, own = self.shares.place(index)
        with errors_of(self._said[task]):
            return self.tasks[task].item(split, own)

    def demonstration(self, item: Item) -> Demonstration | None:
        """The item's answer as a sample, of a supervised job, which has one task."""
        return self.only.demonstration(item) if len(self.tasks) == 1 else None


def _encodable(text: str) -> str:
    """The text, if messages can carry it: whatever made it, a lone surrogate goes no further than here."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            field="spec.task",
            rule=f"prompts and targets must be UTF-8: {error.reason}",
            got=text,
            fix="look at data set, format and chat",
        ) from None
    return text


def make_format(function: PythonFunction | None, *, base_dir: Path) -> Format:
    """The user's format function, or question and answer as they are."""
    if function is None:
        return lambda question: (question.question, question.answer or "")
    loaded = load_function(
        function.function, base_dir=base_dir, keywords=FORMAT_KEYWORDS, field=f"{FORMAT_FIELD}.function"
    )

    def make_texts(question: Question) -> tuple[str, str]:
        try:
            texts = loaded(question=question.question, answer=question.answer, metadata=dict(question.metadata))
        except Exception as error:
            raise UserError(
                field=FORMAT_FIELD,
                rule=f"{function.function} raised {type(error).__name__}: {error}",
                got=question.question,
            ) from error
        return _checked_texts(texts)

    return make_texts


def _checked_texts(texts: object) -> tuple[str, str]:
    if isinstance(texts, Mapping):
        prompt, target = texts.get("prompt"), texts.get("target")
        if isinstance(prompt, str) and prompt and isinstance(target, str):
            return prompt, target
    raise UserError(
        field=FORMAT_FIELD, rule="must return {'prompt': str, 'target': str}, the prompt not empty", got=texts
    )


def _reasoning_gym(task: SingleTask, *, seed: int, base_dir: Path, answered: bool) -> QuestionSource:
    from streamrl_workers.tasks.procedural import open_procedural, refused_verifiers

    for refused in refused_verifiers(task):
        raise refused
    del base_dir, answered  # has no files, and makes its answers
    assert isinstance(task.dataset.value, ReasoningGymDataset)
    return open_procedural(task.dataset.value, seed=seed)


def _jsonl(task: SingleTask, *, seed: int, base_dir: Path, answered: bool) -> QuestionSource:
    from streamrl_workers.tasks.jsonl import open_jsonl

    assert isinstance(task.dataset.value, JsonlDataset)
    return open_jsonl(task.dataset.value, seed=seed, base_dir=base_dir, answered=answered)


def _hugging_face(task: SingleTask, *, seed: int, base_dir: Path, answered: bool) -> QuestionSource:
    from streamrl_workers.tasks.huggingface import open_huggingface

    del answered  # its rows have answers where `answerField` is set
    return open_huggingface(task, seed=seed, base_dir=base_dir)


DATASETS: dict[str, Callable[..., QuestionSource]] = {
    "reasoningGym": _reasoning_gym,
    "jsonl": _jsonl,
    "huggingFace": _hugging_face,
}
"""`answered`: whether each row must have an answer."""


_OF_A_TASK = re.compile(r"\bspec\.task\.(?=(dataset|format|chat|environment|rewards)\b)")


@contextlib.contextmanager
def errors_of(task: SingleTask) -> Iterator[None]:
    """User errors about a field of a task name it where the job has it: in the mixture, if there is one."""
    try:
        yield
    except UserError as error:
        if not task.name:
            raise
        field, rule, fix = (_OF_A_TASK.sub(f"{task.field}.", text) for text in (error.field, error.rule, error.fix))
        raise UserError(field=field, rule=rule, got=error.got, fix=fix) from error


def open_dataset(
    task: Task, *, seed: int, base_dir: Path, model_path: str = "", supervised: SupervisedSpec | None = None
) -> MixedDataset:
    """Open the data sets of all tasks; makes one item of each split of each, so that what is wrong shows at once.

    Args:
        task: what the job says.
        seed: the job's.
        base_dir: where its paths begin.
        model_path: directory of the tokenizer whose chat template is used; "" = the run has none.
        supervised: the algorithm, where answers are trained: which of them, and, by the tokenizer, as samples; None = another one.

    Raises:
        UserError: the data set, its file, the format function or the chat template cannot be used.
    """
    tasks = [
        _open_task(one, seed=seed, base_dir=base_dir, model_path=model_path, supervised=supervised)
        for one in task.tasks
    ]
    return MixedDataset(tasks, of=task)


def _open_task(
    task: SingleTask, *, seed: int, base_dir: Path, model_path: str, supervised: SupervisedSpec | None
) -> TaskDataset:
    with errors_of(task):
        chat = None if task.chat is None else open_chat(task.chat, model_path=model_path)
        of_tokens = supervised is not None and supervised.answers == "Tokens"
        source = DATASETS[task.dataset.key](task, seed=seed, base_dir=base_dir, answered=not of_tokens)
        demonstrations = rewards = None
        if supervised is not None:
            rewards = RowRewards(supervised, place=source.place, key=hash_of)
            _choose_rows(source, supervised, rewards=rewards)
            if model_path:
                demonstrations = open_demonstrations(task, model_path=model_path, tokens=of_tokens)
        dataset = TaskDataset(
            source,
            make_texts=make_format(task.format, base_dir=base_dir),
            chat=chat,
            demonstrations=demonstrations,
            rewards=rewards,
        )
        dataset.item("train", 0)
        dataset.item("held_out", 0)
        return dataset


def _choose_rows(source: QuestionSource, supervised: SupervisedSpec, *, rewards: RowRewards) -> None:
    """Leave out what nobody could score, what earned too little, and then what weighs nothing."""
    if isinstance(source, RowSource) and (name := supervised.reward_field) is not None:
        source.keep(lambda question: question.metadata.get(name, 0.0) is not None)
    if supervised.min_reward is None and supervised.weights is None:
        return
    field = f"{SUPERVISED_FIELD}.{'weights' if supervised.min_reward is None else 'minReward'}"
    if not isinstance(source, RowSource):
        raise UserError(field=field, rule="needs a data set of rows: jsonl or huggingFace", got=supervised.min_reward)
    if (least := supervised.min_reward) is not None:
        source.keep(lambda question: rewards.reward(question) >= least)
        if not (source.train_size and source.held_out_size):
            rule = f"leaves {source.train_size} rows to train on and {source.held_out_size} held out: both need one"
            raise UserError(field=field, rule=rule, got=least, fix="lower it")
    if supervised.weights is not None and supervised.critic is None:
        rewards.compare(source.questions())
        source.keep(lambda question: rewards.weight(question) > 0)


class _NoSource:
    """Of a process that is told its items."""

    held_out_size = train_size = None
    data = ""

    def place(self, source_index: int) -> str:
        """Nobody may ask."""
        raise AssertionError(f"item {source_index} is somewhere else")

    def question(self, split: Split, index: int) -> Question:
        """Nobody may ask."""
        raise AssertionError(f"item {index} of {split} comes along with what is asked about it")

    def verify(self, answer: str, item: Item) -> float:
        """Nobody may ask."""
        raise AssertionError(f"{answer} to {item.source_index} is scored elsewhere")


def open_no_dataset(task: Task, *, model_path: str) -> MixedDataset:
    """Of the task its chat template alone. Raises `UserError` as `open_dataset`."""
    chat = None if task.chat is None else open_chat(task.chat, model_path=model_path)
    nothing = TaskDataset(_NoSource(), make_texts=lambda question: (question.question, ""), chat=chat)
    return MixedDataset([nothing], of=task)
