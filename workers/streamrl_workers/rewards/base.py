"""What a reward sees and what it is, and what rewards share: patterns, and functions of the user's own.

A scorer is called as `scorer(completion, item)` and returns a number. It may raise or hang: the
process that calls it is watched from outside, so a scorer needs no time limit of its own. An endpoint judges elsewhere: many
samples wait for it at once, so it holds its time limit itself.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamrl.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One task item: what is asked and what is expected."""

    prompt: str
    target: str
    """Text of the supervised warm-up; "" if the data set gives no reference answer and no format function gives one."""
    question: str
    """The question as the data set puts it, before `spec.task.format`."""
    answer: str | None
    """Reference answer; None where many answers are right and only the verifier can tell."""
    metadata: Mapping[str, Any]
    source_index: int
    """Where the data set holds it: the generator's index, or the line number counted from 0."""
    environment_reward: float = 0.0
    """Of the sample that is scored: sum of what the environment gave for its turns; 0 without one."""


Scorer = Callable[[str, Item], object]
"""(completion, item) -> number. Anything but a finite number counts as a failure of the sample."""


Verify = Callable[[str, Item], float]
"""(answer, item) -> number: the data set's own verdict on an extracted answer. Raises `VerifierRaisedError` if its code raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a reward is made from, beside its own options."""

    field: str
    """Path of the reward's options in the job file, for errors."""
    base_dir: Path
    """Where the user's modules lie."""
    verify: Verify
    timeout_s: float
    """The reward's time limit for one sample."""


class VerifierRaisedError(Exception):
    """Refusal of an answer by an exception of the data set's own verifier: the answer scores 0, and the sample is counted."""


Extract = Callable[[str], str | None]


def compile_pattern(pattern: str, *, field: str) -> re.Pattern[str]:
    """Compile the user's pattern; a bad one is the user's error."""
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(field=field, rule=f"must be a regular expression of Python: {error}", got=pattern) from error


def make_extract(pattern: str | None, *, field: str) -> Extract:
    """Answer = first group (or the whole match) of the last match; None if there is no match or the group took no part.

    Without a pattern the answer is the whole completion.
    """
    if pattern is None:
        return lambda completion: completion
    compiled = compile_pattern(pattern, field=field)
    group = 1 if compiled.groups else 0

    def extract(completion: str) -> str | None:
        last = None
        for last in compiled.finditer(completion):  # noqa: B007 - only the last counts
            pass
        return last.group(group) if last else None

    return extract


def load_function(name: str, *, base_dir: Path, keywords: tuple[str, ...], field: str) -> Callable[..., Any]:
    """Import `module:function` with `base_dir` first on the path; it will be called with `keywords`."""
    function = load_attribute(name, directory=base_dir, what="function", field=field)
    if not callable(function):
        raise UserError(field=field, rule="must name a function", got=function)
    _check_signature(function, keywords=keywords, field=field)
    return function  # type: ignore[no-any-return] # an attribute is Any


def load_attribute(name: str, *, directory: Path | None, what: Literal["function", "class"], field: str) -> Any:  # noqa: ANN401 - whatever a module holds
    """Import `module:name` with `directory` first on the path; None: only what is installed. `what` is expected there."""
    module_name, _, own_name = name.partition(":")
    if directory is not None:
        _put_on_path(directory)
    module = _import_module(module_name, base_dir=directory, field=field)
    found = getattr(module, own_name, None)
    if found is None:
        is_wanted = inspect.isfunction if what == "function" else inspect.isclass
        known = [key for key, value in vars(module).items() if is_wanted(value)]
        raise UserError(
            field=field,
            rule=f"module {module_name} has no {what} {own_name}",
            fix=f"it has {', '.join(sorted(known)) or 'none'}",
        )
    return found


def _put_on_path(base_dir: Path) -> None:
    entry = str(base_dir.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)
        importlib.invalidate_caches()


def _import_module(module_name: str, *, base_dir: Path | None, field: str) -> object:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise UserError(field=field, rule=f"importing module {module_name} failed: {error}") from error
        where, fix = (
            (f"in {base_dir}", "put it beside the job file") if base_dir else ("installed", "put it into the image")
        )
        raise UserError(field=field, rule=f"there is no module {module_name} {where}", fix=fix) from error
    except (Exception, SystemExit) as error:
        text = f"importing module {module_name} failed: {type(error).__name__}: {error}"
        raise UserError(field=field, rule=" ".join(text.split())) from error


def _check_signature(function: Callable[..., Any], *, keywords: tuple[str, ...], field: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a function in C may not tell; a wrong call then shows as a failure of the sample
    try:
        signature.bind(**dict.fromkeys(keywords))
    except TypeError as error:
        raise UserError(
            field=field, rule=f"is called with the keywords {', '.join(keywords)}, but {error}", got=str(signature)
        ) from error
