"""Text for people: columns, ages, shares. Pure."""

from collections.abc import Sequence
from datetime import UTC, datetime

ABSENT = "-"
_STEPS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))
_LEAST_OF_UNIT = 3
"""Below three of a unit the next smaller one is shown: 150 s, 100 m."""


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as what is in them."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def age(since: str | None, *, now: datetime) -> str:
    """Time from a timestamp of the API server until now: `45s`, `12m`, `3h`."""
    return ABSENT if not since else duration((now - moment(since)).total_seconds())


def moment(text: str) -> datetime:
    """A timestamp of the API server."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone(UTC)


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
