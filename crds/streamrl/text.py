"""The one place where text leaves a process for people: terminals, logs, lines of errors.

Much of it was written by others: fields of files, names, what a peer or an API server said. A terminal acts on control
characters in it. Invariant: what leaves has none but line feeds and tabs; the others are shown as Python writes them (`\\x1b`).
Invisible marks that scripts and emoji are written with (soft hyphen, zero-width space, marks of direction, tag letters) stay.
"""

import logging
import re
import sys
from typing import TextIO

_ACTED_ON = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and line feed, DEL, C1
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # ends a line, turns the direction of what follows, or is invisible
    "\ud800-\udfff"  # halves of pairs: no encoding has them
    "\U000e0000-\U000e001f"  # tags of languages; the letters of tags behind them are parts of emoji
    "]"
)


def plain(text: str) -> str:
    """`text` with each character that a terminal acts on, or hides, as its escape."""
    return _ACTED_ON.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def say(*lines: str, to: TextIO | None = None) -> None:
    """Write whole lines, at once; a line feed within one is shown as `\\n`. `to`: standard error where it is left out."""
    stream = to or sys.stderr
    stream.write("".join(plain(line.replace("\n", "\\n")) + "\n" for line in lines))
    stream.flush()


class LineFormatter(logging.Formatter):
    """The formatter of every worker's log; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return plain(super().format(record))


def log_to_stderr() -> None:
    """Logs of this process, from now on, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
