"""Holds a trace file against the Trace Event Format, as far as Perfetto's importer asks for it."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

_CLOCK_US = 0.5
"""Times are doubles of microseconds."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a file that an importer takes: known phases with their fields, spans of a track one in the other or apart."""
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    events = document["traceEvents"]
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    tracks = defaultdict(list)
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert event["pid"] in named, event
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str), (
                    event
                )
            case "X":
                assert event["dur"] >= 0, event
                tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] in ("g", "p", "t") and event["ts"] >= 0, event
            case other:
                raise AssertionError(f"no phase of ours: {other}")
    for track, spans in tracks.items():
        assert_nested(track, spans)
    return events


def assert_nested(track: tuple[int, int], spans: list[tuple[float, float]]) -> None:
    """An importer drops a span that begins in another one and ends behind it."""
    open_until: list[float] = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_until and open_until[-1] <= begin + _CLOCK_US:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + _CLOCK_US, (track, begin, end, open_until[-1])
        open_until.append(end)


def processes(events: list[dict[str, Any]]) -> dict[int, str]:
    """Number -> name."""
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
