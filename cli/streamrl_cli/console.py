"""The one place where commands write for people: whole lines, without what a terminal acts on (`streamrl.text`)."""

import os
import signal
import sys
from typing import TextIO

from streamrl.text import plain, say

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""What shells expect of a program that Ctrl-C stopped."""


def out(*lines: str) -> None:
    """Write lines of result."""
    say(*lines, to=sys.stdout)


def ask(question: str) -> str:
    """What the user answers; the question is one line."""
    return input(f"{plain(' '.join(question.split()))} ")


def own_output() -> TextIO:
    """Standard output for the caller's lines alone: what user code prints goes to standard error, and so does what processes that an engine starts do."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return output


def warn(*lines: str) -> None:
    """Write warnings, which stop nothing."""
    err(*(f"warning: {line}" for line in lines))


def err(*lines: str) -> None:
    """Write lines that are no result: a mistake, progress, advice."""
    say(*lines, to=sys.stderr)
