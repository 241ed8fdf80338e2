"""The tour through the code names what is there."""

import re
from itertools import pairwise

from support.pages import Page
from support.tree import ROOT

TOUR = Page(ROOT / "docs/tour.md")
HEADING = re.compile(r"^## \d+\. `(.+)`$")
NAME = re.compile(r"^- `(\w+)`")


def test_each_name_of_the_tour_is_in_its_file() -> None:
    stops = [(number, found[1]) for number, line in enumerate(TOUR.lines) if (found := HEADING.match(line))]
    assert len(stops) == 10
    for (start, name), (end, _) in pairwise([*stops, (len(TOUR.lines), "")]):
        code = (ROOT / name).read_text(encoding="utf-8")
        named = [found[1] for line in TOUR.lines[start:end] if (found := NAME.match(line))]
        assert named, name
        assert [one for one in named if not re.search(rf"\b(?:def|class|service|message) {one}\b", code)] == [], name
