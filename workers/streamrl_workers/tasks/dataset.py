"""A data set as the rest sees it: items by (split, index), made again at any time from these and the seed alone.

A source (one file for each kind) gives questions; this file adds the user's format and the chat template. It does not score.
Invariant: no question of one split is a question of the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.errors import UserError
from streamrl.spec.base import PythonFunction
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.functions import load_function
from streamrl_workers.tasks.values import Split

if TYPE_CHECKING:
    from streamrl_workers.tasks.chat import ChatTemplate

FORMAT_FIELD = "spec.task.format"
FORMAT_KEYWORDS = ("question", "answer", "metadata")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a source gives."""

    question: str
    answer: str | None
    metadata: Mapping[str, Any]
    source_index: int


class Source(Protocol):
    """One kind of data set."""

    @property
    def held_out_size(self) -> int | None:
        """Held-out items; None = endless."""

    def question(self, split: Split, index: int) -> Question:
        """Question `index` >= 0 of a split; held-out indexes are below `held_out_size`."""

    def verify(self, answer: str, item: Item) -> float:
        """The data set's own verdict on an answer."""


Format = Callable[[Question], tuple[str, str]]
"""question -> (prompt, target)"""


class TaskDataset:
    """A source, the user's format, and the chat template around what it gives."""

    def __init__(self, source: Source, *, make_texts: Format, chat: "ChatTemplate | None" = None) -> None:
        self._source = source
        self._make_texts = make_texts
        self.chat = chat
        """None: prompts are plain text."""
        self.verify = source.verify

    @property
    def held_out_size(self) -> int | None:
        """Held-out items; None = endless."""
        return self._source.held_out_size

    def item(self, split: Split, index: int) -> Item:
        """Item `index` of a split. Raises `UserError` if the user's format function or the chat template fails on it."""
        question = self._source.question(split, index)
        prompt, target = self._make_texts(question)
        return Item(
            prompt=prompt if self.chat is None else self.chat.prompt(prompt),
            target=target,
            question=question.question,
            answer=question.answer,
            metadata=question.metadata,
            source_index=question.source_index,
        )


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
