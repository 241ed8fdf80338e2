"""Texts are short: their sentences, and all of them together."""

from itertools import pairwise

import pytest

from support.pages import Page, guides, pages

MEDIAN_WORDS, NINTH_WORDS = 18, 30
"""The most words of a page's median sentence, and of the one that nine in ten do not exceed."""
NOT_YET: dict[str, tuple[int, int]] = {}
"""Pages with longer ones, and how long they are now. Figures only shrink; a page that is within the bounds leaves the list."""
MOST_WORDS = 30_000
"""Of README and docs together, without decisions and reference. It grows with features alone. A word has a letter or a digit: lines of tables have none."""


@pytest.mark.parametrize("page", guides(), ids=lambda page: page.name)
def test_sentences_are_short(page: Page) -> None:
    median, ninth = NOT_YET.get(page.name, (0, 0))
    longest = max(page.sentences, key=lambda sentence: len(sentence.split()), default="")
    most = (max(MEDIAN_WORDS, median), max(NINTH_WORDS, ninth))
    assert all(have <= bound for have, bound in zip(page.lengths, most, strict=True)), (
        f"median and ninth decile are {page.lengths} words, at most {most}; the longest: {longest}"
    )


def test_the_list_of_long_pages_only_shrinks() -> None:
    lengths = {page.name: page.lengths for page in guides()}
    long = {
        name: (median, ninth)
        for name, (median, ninth) in lengths.items()
        if median > MEDIAN_WORDS or ninth > NINTH_WORDS
    }
    assert long == NOT_YET, "write it into NOT_YET as it is now, if no figure has grown"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_table_begins_after_an_empty_line(page: Page) -> None:
    """Otherwise it is drawn as text."""
    lines = ["", *page.lines]
    assert [line for before, line in pairwise(lines) if line.startswith("|") and before and before[0] != "|"] == []


def test_the_docs_do_not_grow() -> None:
    texts = [page.text for page in guides() if page.name == "README.md" or page.name.startswith("docs/")]
    words = sum(any(map(str.isalnum, word)) for text in texts for word in text.split())
    assert words <= MOST_WORDS
