"""Links between the repository's files lead somewhere. The site checks its own pages once more (`make docs`)."""

import os.path

import pytest

from support.pages import Page, pages
from support.tree import ROOT

GENERATED = [
    Page(path)
    for path in [*sorted((ROOT / "docs/reference").glob("*.md")), *sorted((ROOT / "helm").glob("*/README.md"))]
]


@pytest.mark.parametrize("page", [*pages(), *GENERATED], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Page) -> None:
    broken = [
        f"{page.name}:{line}: {target}"
        for line, target in page.links
        if not target.startswith(("http://", "https://", "mailto:")) and not _exists(page, target)
    ]
    assert broken == []


def _exists(page: Page, target: str) -> bool:
    name, _, anchor = target.partition("#")
    path = page.path if not name else page.path.parent / name
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in Page(path).anchors


def test_the_front_page_lists_every_page_once() -> None:
    """The navigation of the site is made from that list; of a folder it names the README.md (`tools/docs_site.py`)."""
    docs, front = ROOT / "docs", Page(ROOT / "docs/index.md")
    entries = [
        os.path.normpath(docs / target) for line, target in front.links if front.lines[line - 1].startswith("- [")
    ]
    there = [*docs.glob("*.md"), *docs.glob("*/README.md"), *docs.glob("reference/*.md")]
    assert sorted(entry for entry in entries if entry.startswith(str(docs))) == sorted(
        str(path) for path in there if path != front.path
    )
