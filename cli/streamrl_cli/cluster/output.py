"""How commands over clusters print: columns, ages, shares; objects as JSON, or as YAML that readers of YAML 1.1 (kubectl) and 1.2 understand alike. Pure."""

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from streamrl.text import plain
from streamrl_operator.planning.values import seconds_since

ABSENT = "-"
_STEPS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_LEAST_OF_UNIT = 3
"""Below three of a unit the next smaller one is shown: 150 s, 100 m."""
FORMS = ("json", "yaml")
_BOOLEANS_OF_1_1 = frozenset(("y", "n", "yes", "no", "on", "off"))
_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9][-+._:0-9a-fA-FxobT]*\Z")
"""YAML 1.1 takes `1:30`, `1_000` and `0b1` for numbers."""


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as what is in them."""
    lines = [tuple(head), *(tuple(plain(cell.replace("\n", " ")) for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table under its title, with a line before; nothing without rows."""
    if rows:
        yield ""
        yield title
        yield from (f"  {line}" for line in columns(head, rows))


def age(since: str | None, *, now: datetime) -> str:
    """Time from a timestamp of the API server until now: `45s`, `12m`, `3h`."""
    seconds = seconds_since(since, now=now)
    return ABSENT if seconds is None else duration(seconds)


def duration(seconds: float) -> str:
    """Whole units of the largest kind of which there are a few."""
    whole = max(0, int(seconds))
    for unit, length in _STEPS:
        if whole >= _LEAST_OF_UNIT * length:
            return f"{whole // length}{unit}"
    return f"{whole}s"


def text(value: object) -> str:
    """A value, or a dash where there is none."""
    if value is None or value == "":
        return ABSENT
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def percent(value: float | None) -> str:
    """A share in percent."""
    return ABSENT if value is None else f"{value:.0f} %"


class _Representer(RoundTripRepresenter):
    """Keeps the order of keys; strings that YAML 1.1 reads as something else are quoted, texts of lines stay readable."""

    def represent_text(self, data: str) -> ScalarNode:
        """A string."""
        style = "'" if data.lower() in _BOOLEANS_OF_1_1 or _LIKE_A_NUMBER.match(data) else None
        if plain(data) != data:
            style = '"'  # its escapes are those of YAML
        lines = data.split("\n")
        if len(lines) > 1 and lines[0][:1].strip() and all(_is_plain(line) for line in lines):
            style = "|"
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    def represent_nothing(self, _data: None) -> ScalarNode:
        """Null."""
        return self.represent_scalar("tag:yaml.org,2002:null", "null")


def _is_plain(line: str) -> bool:
    """Whether a line survives as it is."""
    return line.isprintable() and line == line.rstrip()


_Representer.add_representer(str, _Representer.represent_text)
_Representer.add_representer(type(None), _Representer.represent_nothing)


def dump(value: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, form: str) -> str:
    """One object or several, as `json` or `yaml`: several are a List, or one document each."""
    several = not isinstance(value, Mapping)
    if form == "json":
        whole = {"apiVersion": "v1", "kind": "List", "items": list(value)} if several else value
        return json.dumps(whole, indent=2)
    writer = YAML()
    writer.Representer = _Representer
    writer.default_flow_style = False
    writer.width = 4096  # no folding: a line is a line
    writer.explicit_start = several
    out = io.StringIO()
    writer.dump_all(list(value) if several else [value], out)
    return out.getvalue().rstrip("\n")
