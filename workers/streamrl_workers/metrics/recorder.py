"""A process's bubble clock: partition, JSONL file and Prometheus counters as one thing.

Owns: when samples are written (every `INTERVAL_S` and at the end). Does not own: what the process does.
Thread-safe: a worker thread may `enter` states while the loop writes samples.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streamrl_workers.metrics.bubbles import Part, State, WallPartition
from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.sink import BubbleSink

INTERVAL_S = 1.0
"""Between two samples: the resolution of timelines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Where instants come from."""

    monotonic_s: Callable[[], float] = time.monotonic
    unix_s: Callable[[], float] = time.time


class Recorder:
    """Counts the wall of this process from its construction on; it begins in `other`."""

    def __init__(self, *, sink: BubbleSink | None, metrics: Metrics | None, clocks: Clocks = Clocks()) -> None:
        self._sink = sink
        self._metrics = metrics
        self._clocks = clocks
        self._lock = threading.Lock()
        self._partition = WallPartition(now_s=clocks.monotonic_s())

    def enter(self, state: State | Part) -> None:
        """From now on the process is in `state`."""
        with self._lock:
            self._partition.enter(state, now_s=self._clocks.monotonic_s())

    @contextmanager
    def during(self, state: State | Part) -> Iterator[None]:
        """Inside, the process is in `state`; afterwards in the state it was in."""
        with self._lock:
            before = self._partition.state
            self._partition.enter(state, now_s=self._clocks.monotonic_s())
        try:
            yield
        finally:
            self.enter(before)

    def totals(self) -> tuple[float, dict[str, float]]:
        """Wall seconds and cumulative seconds of every part, now."""
        with self._lock:
            now_s = self._clocks.monotonic_s()
            return self._partition.wall_s(now_s=now_s), self._partition.parts(now_s=now_s)

    def refresh(self) -> tuple[float, dict[str, float]]:
        """Bring the counters up to now; what `totals` says."""
        wall_s, parts = self.totals()
        if self._metrics is not None:
            self._metrics.bubbles(parts=parts, wall_s=wall_s)
        return wall_s, parts

    def sample(self) -> None:
        """Write one sample to file and counters."""
        wall_s, parts = self.refresh()
        if self._sink is not None:
            self._sink.write(t_s=self._clocks.unix_s(), wall_s=wall_s, parts=parts)

    async def run(self) -> None:
        """Write a sample every `INTERVAL_S` until cancelled; the last one is written by `close`."""
        while True:
            self.sample()
            await asyncio.sleep(INTERVAL_S)

    def close(self) -> None:
        """Write the last sample and close the file."""
        self.sample()
        if self._sink is not None:
            self._sink.close()
            self._sink = None
