"""Makes prompts and scores completions, one after the other, inside a worker of the pool.

Whatever the user's functions do becomes a result or a failure of the one sample. What cannot be caught here (a hang, the
end of the process) is seen by the pool from outside, by the progress row.

Rows: a request is [split, index, completion | null]; null asks for the prompt. A result is [prompt], or
[reward, part, part, ...], or {"kind", "error"}.
"""

import functools
import resource
from collections.abc import Sequence

from streamrl.errors import UserError
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.registry import BadValueError, Part, weighted_sum
from streamrl_workers.tasks.dataset import TaskDataset
from streamrl_workers.tasks.progress import MAKING_ITEM, ProgressTable
from streamrl_workers.tasks.values import FailureKind, Split

Request = tuple[Split, int, str | None]
Row = list[str] | list[float] | dict[str, str]

ITEMS_KEPT = 1024
"""A group's samples come close together; an item that fell out is made again."""
MAX_ERROR_CHARS = 500


class Scoring:
    """The work of one worker."""

    def __init__(self, *, dataset: TaskDataset, parts: Sequence[Part], progress: ProgressTable, worker: int) -> None:
        self._item = functools.lru_cache(maxsize=ITEMS_KEPT)(dataset.item)
        self._parts = parts
        self._progress = progress
        self._worker = worker
        self._number = 0

    def answer(self, request: Request) -> Row:
        """Result of one request; never raises for what the user's code does."""
        split, index, completion = request
        where = ""
        try:
            self._enter(MAKING_ITEM)
            item = self._item(split, index)
            if completion is None:
                return [item.prompt]
            values = []
            for stage, part in enumerate(self._parts):
                where = f"{part.name}: "
                values.append(self._value(part, stage=stage, completion=completion, item=item))
            return [weighted_sum(self._parts, values), *values]
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit included
            return _failure(where, error)
        finally:
            self._progress.leave(self._worker)
            self._number += 1

    def _value(self, part: Part, *, stage: int, completion: str, item: Item) -> float:
        self._enter(stage)
        return part.value(completion, item)

    def _enter(self, stage: int) -> None:
        self._progress.enter(self._worker, number=self._number, stage=stage)


def _failure(where: str, error: BaseException) -> dict[str, str]:
    kind: FailureKind = "raised"
    if isinstance(error, MemoryError):
        _lift_memory_limit()
        return {"kind": "memory", "error": f"{where}ran out of memory"}
    if isinstance(error, BadValueError):
        kind, text = "bad_value", _text(error)
    elif isinstance(error, UserError):
        text = _text(error)
    else:
        text = f"raised {type(error).__name__}: {_text(error)}"
    return {"kind": kind, "error": f"{where}{text}"[:MAX_ERROR_CHARS]}


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - the user's own exception may fail to print
        return "(its text cannot be made)"


def _lift_memory_limit() -> None:
    """Room to report what happened; the worker ends after it."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
