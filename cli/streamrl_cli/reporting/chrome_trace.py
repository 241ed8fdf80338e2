"""A file that ui.perfetto.dev and chrome://tracing read: Trace Event Format, JSON. Written by the simulator and by reports of runs.

Owns the format, and which slot a sample is drawn on. Does not own what happened when.

A process is a group of tracks: 0 for what the process itself does, the others for slots or as their user names them. Times in the file are microseconds.
"""

import json
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from streamrl.files import replace_file

_US = 1e6
OWN_TRACK = 0
"""Slots are the tracks from 1 on."""


class ChromeTrace:
    """Spans as they become known; instants are seconds from a zero of the user's choice."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._free: dict[str, list[int]] = {}
        self._slots: dict[str, int] = {}
        self._open: dict[tuple[str, tuple[int, int]], tuple[int, float]] = {}

    def began(self, process: str, sample: tuple[int, int], *, now_s: float) -> None:
        """A sample takes the lowest free slot. Samples begin and end in the order of time."""
        free = self._free.setdefault(process, [])
        if not free:
            self._slots[process] = self._slots.get(process, 0) + 1
        slot = heappop(free) if free else self._slots[process]
        self._open[process, sample] = (slot, now_s)

    def ended(self, process: str, sample: tuple[int, int], *, tokens: int | None, now_s: float, **args: object) -> None:
        """It is finished, or lost (`tokens` None)."""
        opened = self._open.pop((process, sample), None)
        if opened is None:
            return
        slot, begun_s = opened
        heappush(self._free[process], slot)
        group, index = sample
        name = f"{group}.{index}" if tokens is not None else f"{group}.{index} lost"
        self.name_track(process, slot, f"slot {slot}")
        self.span(process, name, begun_s=begun_s, seconds=now_s - begun_s, track=slot, tokens=tokens, **args)

    def span(
        self, process: str, name: str, *, begun_s: float, seconds: float, track: int = OWN_TRACK, **args: object
    ) -> None:
        """Something that takes time. Spans of a track do not overlap, or one holds the other."""
        span = {"name": name, "ph": "X", **self._at(process, track), "ts": begun_s * _US, "dur": seconds * _US}
        self._events.append(span | {"args": args} if args else span)

    def instant(self, process: str, name: str, *, at_s: float, track: int = OWN_TRACK) -> None:
        """Something that happens at once."""
        self._events.append({"name": name, "ph": "i", "s": "p", **self._at(process, track), "ts": at_s * _US})

    def name_track(self, process: str, track: int, name: str) -> None:
        """How a track is called."""
        self._names[self._number(process), track] = name

    def write(self, path: Path) -> None:
        """Write the file. Raises `UserError`: it cannot be written."""
        names = [
            {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": process}}
            for process, number in self._processes.items()
        ]
        tracks = [
            {"name": "thread_name", "ph": "M", "pid": number, "tid": track, "args": {"name": name}}
            for (number, track), name in self._names.items()
        ]
        document = {"displayTimeUnit": "ms", "traceEvents": [*names, *tracks, *self._events]}
        replace_file(path, json.dumps(document, separators=(",", ":")).encode())

    def _at(self, process: str, track: int) -> dict[str, int]:
        return {"pid": self._number(process), "tid": track}

    def _number(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes) + 1)
