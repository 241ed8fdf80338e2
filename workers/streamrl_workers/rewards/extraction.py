"""Finds the answer in a completion by a regular expression."""

import re
from collections.abc import Callable

from streamrl.errors import UserError

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
