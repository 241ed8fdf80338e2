"""Makes prompts, answers turns and scores completions, one after the other, inside a worker of the pool.

Whatever the user's functions do becomes a result or a failure of the one sample. What cannot be caught here (a hang, the
end of the process) is seen by the pool from outside, by the progress row.

Rows: a request is a `WorkRequest`. A result is [prompt], or [reward, part, part, ...], or [observation, reward, done], or
{"kind", "error"}.
"""

import functools
import resource
from collections.abc import Sequence
from dataclasses import replace

from streamrl.errors import UserError
from streamrl_workers.environments.player import EnvironmentSource, Player
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.registry import BadValueError, Part, weighted_sum
from streamrl_workers.tasks.dataset import TaskDataset
from streamrl_workers.tasks.progress import MAKING_ITEM, PLAYING, ProgressTable
from streamrl_workers.tasks.values import FailureKind, Turn, WorkRequest

Row = list[str] | list[float] | list[str | float | bool] | dict[str, str]

ITEMS_KEPT = 1024
"""A group's samples come close together; an item that fell out is made again."""
MAX_ERROR_CHARS = 500


class Scoring:
    """The work of one worker."""

    def __init__(
        self,
        *,
        dataset: TaskDataset,
        parts: Sequence[Part],
        environments: EnvironmentSource | None = None,
        progress: ProgressTable,
        worker: int,
    ) -> None:
        """`environments` None: the job has none."""
        self._dataset = dataset
        self._player = None if environments is None else Player(environments, entering=self._enter_environment)
        self._item = functools.lru_cache(maxsize=ITEMS_KEPT)(dataset.item)
        self._parts = parts
        self._progress = progress
        self._worker = worker
        self._number = 0
        self._where = ""
        """Whose code is running, as errors begin."""

    def answer(self, request: WorkRequest) -> Row:
        """Result of one request; never raises for what the user's code does."""
        try:
            return self._row_in_memory(request)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            return _failure(self._where, error)
        finally:
            self._progress.leave(self._worker)
            self._number += 1

    def _row_in_memory(self, request: WorkRequest) -> Row:
        """Environments of other samples may be what fills the memory: they go, and are made again when their turns come."""
        try:
            return self._row(request)
        except MemoryError:
            self._enter(MAKING_ITEM)  # gigabytes take seconds to go, which are not this sample's
            if self._player is None or not self._player.forget():
                raise
        return self._row(request)

    def _row(self, request: WorkRequest) -> Row:
        self._where = ""
        self._enter(MAKING_ITEM)
        item = self._item(request.split, request.item)
        if request.turn is not None:
            self._where = "environment: "
            return self._play(item, request)
        if request.completion is None:
            return [item.prompt]
        item = replace(item, environment_reward=request.environment_reward)
        values = []
        for stage, part in enumerate(self._parts):
            self._where = f"{part.name}: "
            values.append(self._value(part, stage=stage, completion=request.completion, item=item))
        return [weighted_sum(self._parts, values), *values]

    def _value(self, part: Part, *, stage: int, completion: str, item: Item) -> float:
        self._enter(stage)
        return part.value(completion, item)

    def _play(self, item: Item, request: WorkRequest) -> list[str | float | bool]:
        assert self._player is not None, "a turn was asked for, and the job has no environment"
        assert request.turn is not None
        turn = Turn(*request.turn)
        answer = self._player.play(
            item,
            split=request.split,
            index=request.item,
            key=(turn.group_id, turn.sample_index),
            completions=turn.completions,
        )
        chat, text = self._dataset.chat, answer.observation
        if chat is not None and not answer.done:
            self._enter(MAKING_ITEM)
            text = chat.observation(text, ended=chat.ends_turn(turn.last_token))
        return [text, answer.reward, answer.done]

    def _enter_environment(self) -> None:
        self._enter(PLAYING)

    def _enter(self, stage: int) -> None:
        self._progress.enter(self._worker, number=self._number, stage=stage)


def _failure(where: str, error: BaseException) -> dict[str, str]:
    kind: FailureKind = "raised"
    if isinstance(error, MemoryError):
        _lift_memory_limit()
        return {"kind": "memory", "error": f"{where}ran out of memory"}
    if isinstance(error, BadValueError):
        kind, text = "bad_value", _text(error)
    elif isinstance(error, TimeoutError):
        kind, text = "timeout", _text(error)
    elif isinstance(error, UserError):
        text = _text(error)
    else:
        text = f"raised {type(error).__name__}: {_text(error)}"
    return {"kind": kind, "error": f"{where}{text}"[:MAX_ERROR_CHARS]}


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split()).encode("utf-8", "replace").decode("utf-8")  # no message carries surrogates
    except Exception:  # noqa: BLE001 - the user's own exception may fail to print
        return "(its text cannot be made)"


def _lift_memory_limit() -> None:
    """Room to report what happened; the worker ends after it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
