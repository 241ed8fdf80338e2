"""The one place where commands write lines for people."""

import sys

from streamrl.errors import UserError, UserErrors


def out(text: str) -> None:
    """Write a line of result."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def err(text: str) -> None:
    """Write a line that is not a result: a mistake, progress, advice."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def lines_of(error: UserError | UserErrors) -> list[str]:
    """One line for each mistake."""
    mistakes = error.errors if isinstance(error, UserErrors) else [error]
    return [" ".join(str(mistake).split()) for mistake in mistakes]
