"""The public face speaks the words of `tests/architecture/words.md`. Prose is not searched."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from architecture.not_yet import OLD_WORDS
from support.public_names import public_names, words_of
from support.tree import ROOT

KINDS = ("modules", "classes", "metrics", "protocol", "crd")


@dataclass(frozen=True)
class Refused:
    """A word of the first column."""

    word: str
    kinds: tuple[str, ...]

    def is_in(self, name: str) -> bool:
        """A capital: the whole name; else these words anywhere in it."""
        if self.word[0].isupper():
            return name == self.word
        ours, theirs = words_of(self.word), words_of(name)
        return any(theirs[at : at + len(ours)] == ours for at in range(len(theirs)))


def refused_words() -> Iterator[Refused]:
    """The rows of all tables."""
    for line in (ROOT / "tests/architecture/words.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or cells[0] == "instead of" or set(cells[0]) == {"-"}:
            continue
        assert len(cells) == 3, f"tests/architecture/words.md: a row has three cells: {line}"
        kinds = tuple(filter(None, cells[2].split(", "))) or KINDS
        assert set(kinds) <= set(KINDS), f"tests/architecture/words.md: no such kind: {line}"
        yield from (Refused(word, kinds) for word in re.findall(r"`(\w+)`", cells[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_has_an_old_word(kind: str) -> None:
    words = [refused for refused in refused_words() if kind in refused.kinds]
    assert words
    found = {name: word.word for name in public_names()[kind] for word in words if word.is_in(name)}
    assert {name: word for name, word in found.items() if name not in OLD_WORDS.get(kind, ())} == {}


@pytest.mark.parametrize(
    ("word", "name", "refused"),
    [
        ("tally", "step_tally", True),
        ("tally", "StepTally", True),
        ("tally", "stepTallyOf", True),
        ("tally", "totally", False),
        ("status_page", "StatusPage", True),
        ("status_page", "page", False),
        ("Place", "Place", True),
        ("Place", "SourcePlace", False),
    ],
)
def test_how_a_word_is_refused(word: str, name: str, *, refused: bool) -> None:
    assert Refused(word, KINDS).is_in(name) is refused
