"""What happened, as a trace that Perfetto and chrome://tracing read (Trace Event Format, JSON).

A process for each replica and one for the trainer; a track for each slot, one for weights. Times in microseconds.
"""

import json
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

_US = 1e6
_WEIGHTS_TRACK = 0
"""Slots are the tracks from 1 on."""


class ChromeTrace:
    """Spans as they become known."""

    def __init__(self) -> None:
        self._spans: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}
        self._tracks: dict[str, int] = {}
        self._open: dict[tuple[str, tuple[int, int]], tuple[int, float]] = {}

    def began(self, process: str, sample: tuple[int, int], *, now_s: float) -> None:
        """A sample takes the lowest free slot."""
        free = self._free.setdefault(process, [])
        if not free:
            self._tracks[process] = self._tracks.get(process, 0) + 1
        track = heappop(free) if free else self._tracks[process]
        self._open[process, sample] = (track, now_s)

    def ended(self, process: str, sample: tuple[int, int], *, tokens: int | None, now_s: float) -> None:
        """It is finished, or lost (`tokens` None)."""
        opened = self._open.pop((process, sample), None)
        if opened is None:
            return
        track, begun_s = opened
        heappush(self._free[process], track)
        group, index = sample
        name = f"{group}.{index}" if tokens is not None else f"{group}.{index} lost"
        self._add(process, name, track=track, begun_s=begun_s, seconds=now_s - begun_s, args={"tokens": tokens})

    def span(self, process: str, name: str, *, begun_s: float, seconds: float) -> None:
        """Something else that takes time."""
        self._add(process, name, track=_WEIGHTS_TRACK, begun_s=begun_s, seconds=seconds, args={})

    def write(self, path: Path) -> None:
        """Write the file."""
        names = [
            {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": process}}
            for process, number in self._processes.items()
        ]
        document = {"displayTimeUnit": "ms", "traceEvents": [*names, *self._spans]}
        path.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")

    def _add(
        self, process: str, name: str, *, track: int, begun_s: float, seconds: float, args: dict[str, Any]
    ) -> None:
        number = self._processes.setdefault(process, len(self._processes) + 1)
        span = {"name": name, "ph": "X", "pid": number, "tid": track, "ts": begun_s * _US, "dur": seconds * _US}
        self._spans.append(span | {"args": args} if args else span)
