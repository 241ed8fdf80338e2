"""The one place where commands write for people: whole lines, without what a terminal acts on (`streamrl.text`)."""

import signal
import sys

from streamrl.text import plain, say

EXIT_INTERRUPTED = 128 + signal.SIGINT
"""What shells expect of a program that Ctrl-C stopped."""


def out(*lines: str) -> None:
    """Write lines of result."""
    say(*lines, to=sys.stdout)


def ask(question: str) -> str:
    """What the user answers; the question is one line."""
    return input(f"{plain(' '.join(question.split()))} ")


def err(*lines: str) -> None:
    """Write lines that are no result: a mistake, progress, advice."""
    say(*lines, to=sys.stderr)
