"""The one error that a user's mistake becomes, and the exit codes of every process.

A `UserError` is one line: which field, which rule, the value got, what to do. Programs print it
without a traceback and exit with `EXIT_USER_ERROR`.
"""

from typing import Any

from streamrl.text import plain

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_USER_ERROR = 2
EXIT_RETRY = 75
"""The process can be started again and will go on from what is stored."""
EXIT_RANK_LOST = 76
"""As EXIT_RETRY, because a rank on another node was lost: what ended that one counts, this does not."""
EXIT_DATA_CHANGED = 77
"""The data of the job is not what its journal was written with. The process can be started again, and goes on once the data is back."""

MOST_LINES = 20
"""Mistakes that are shown at once: more are not read."""
_MAX_VALUE_CHARS = 120
_MAX_PART_CHARS = 2000
"""Of a field, a rule or an advice: names in them may come from a file."""


def shorten(value: object) -> str:
    """Render `value` on one line of at most `_MAX_VALUE_CHARS` characters."""
    text = " ".join((str(value).lower() if isinstance(value, bool) else _repr(value)).split())
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    return text[: _MAX_VALUE_CHARS - 1] + "…"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except (ValueError, RecursionError):  # a number of over 4,300 digits; lists in lists
        return f"a {type(value).__name__} that is too long to show"


class UserError(ValueError):
    """Something that the user wrote cannot be honoured.

    Args:
        field: path of the field, as written in the file (`spec.pipeline.steps`) or the thing named.
        rule: the rule that was broken, as a statement ("must be at least 1").
        got: the offending value; None leaves it out of the text.
        fix: what to do, as an imperative.
    """

    def __init__(self, *, field: str, rule: str, got: object = None, fix: str = "") -> None:
        self.field = field
        self.rule = rule
        self.got = got
        self.fix = fix
        value = "" if got is None else f", got {shorten(got)}"
        remedy = f"; {_cut(fix)}" if fix else ""
        super().__init__(_line(f"{_cut(field)}: {_cut(rule)}{value}{remedy}"))

    @property
    def lines(self) -> list[str]:
        """What to print."""
        return [str(self)]

    @property
    def parts(self) -> dict[str, Any]:
        """What it is made of, as JSON takes it to another process."""
        got = self.got if isinstance(self.got, str | int | float | None) else repr(self.got)
        return {"field": self.field, "rule": self.rule, "got": got, "fix": self.fix}


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_PART_CHARS else f"{text[:_MAX_PART_CHARS]}…"


def _line(text: str) -> str:
    """On one line, without what a terminal acts on."""
    return plain(" ".join(text.split()))


class UserErrors(ValueError):  # noqa: N818 - several of them, one word more says nothing
    """Several user errors found in one file; prints one line each, up to `MOST_LINES`. A list of errors leaves a process in this way alone."""

    def __init__(self, errors: list[UserError]) -> None:
        self.errors = errors
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> list[str]:
        """What to print: one line for each of the first mistakes, and the number of the others."""
        more = len(self.errors) - MOST_LINES
        return [*map(str, self.errors[:MOST_LINES]), *([f"and {more} more"] if more > 0 else [])]
