"""The table of rights in docs/reference/rights.md, as data."""

import re
from typing import NamedTuple

from support.tree import ROOT

_ROW = re.compile(r"^\| `")


class Right(NamedTuple):
    """One verb on one resource."""

    account: str
    where: str
    group: str
    resource: str
    name: str
    """Of the one object that it is for; empty: all of them."""
    verb: str


def documented(*, conditional: bool = True) -> set[Right]:
    """The table's rights; without `conditional` those that need no value of the chart."""
    found: set[Right] = set()
    for line in (ROOT / "docs/reference/rights.md").read_text().splitlines():
        if not _ROW.match(line):
            continue
        account, where, group, resources, verbs, needs, what_for = (
            cell.strip() for cell in line.strip("| ").split(" | ")
        )
        assert what_for, f"say what it is for: {line}"
        if needs != "-" and not conditional:
            continue
        for resource in _words(resources):
            kind, _, name = resource.partition("=")
            found |= {Right(account.strip("`"), where, group.strip("`-"), kind, name, verb) for verb in _words(verbs)}
    return found


def _words(cell: str) -> list[str]:
    return [word.strip("` ") for word in cell.split(",")]
