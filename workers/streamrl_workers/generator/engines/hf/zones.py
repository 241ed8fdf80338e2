"""Rows of alike lengths stand together, so that short ones do not attend across the width of the longest.

Owns: the order of rows by length class, and the widths that follow. Pure. Does not own: keys and values, sequences.

With one long answer among 63 short ones, attention over one common width spends nearly all its time on what the mask
hides. Attention is therefore computed zone by zone; the longest rows come first.

Invariant: a zone is as wide as its longest row needs, whatever the order of rows; the order only makes zones few and narrow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_FIRST_CLASS_TOKENS = 64
"""Rows up to this length are one class: below it, one more call costs more than the hidden tokens. Classes double from here."""

_WIDTH_STEP_TOKENS = 16
"""Widths are rounded up to this, so that tensor sizes repeat and the allocator reuses its blocks."""


@dataclass(frozen=True, slots=True)
class Zone:
    """Rows `first` to `end` (exclusive) attend to `width` tokens."""

    first: int
    end: int
    width: int


def length_class(tokens: int) -> int:
    """0 up to 64 tokens, 1 up to 128, 2 up to 256, ..."""
    return ((tokens - 1) // _FIRST_CLASS_TOKENS).bit_length()


def swaps(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Exchanges of rows, one after the other, that put longer classes before shorter ones; none if they stand so."""
    classes = [length_class(tokens) for tokens in lengths]
    wanted = sorted(classes, reverse=True)
    if classes == wanted:
        return []
    done: list[tuple[int, int]] = []
    for row, right in enumerate(wanted):
        if classes[row] != right:
            # The last one: rows that have just come, which are short, stand at the end anyway.
            other = next(place for place in range(len(classes) - 1, row, -1) if classes[place] == right)
            classes[row], classes[other] = classes[other], classes[row]
            done.append((row, other))
    return done


def zones(lengths: Sequence[int]) -> tuple[Zone, ...]:
    """Runs of rows of one class, each as wide as its longest row, rounded up."""
    found: list[Zone] = []
    first = 0
    for row in range(1, len(lengths) + 1):
        if row == len(lengths) or length_class(lengths[row]) != length_class(lengths[first]):
            longest = max(lengths[first:row])
            found.append(Zone(first, row, -(-longest // _WIDTH_STEP_TOKENS) * _WIDTH_STEP_TOKENS))
            first = row
    return tuple(found)
