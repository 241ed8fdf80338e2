"""What a generator shows on its signals port: its metrics, keys of its status. Does not own the server, the values."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from streamrl_workers.generator.engine_loop import EngineLoop, EngineStatus
from streamrl_workers.generator.engines.base import LoadPart
from streamrl_workers.generator.link import GeneratorLink
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.metrics.signals import Signals, WallMetrics
from streamrl_workers.weights.address import PullTimes

_SOURCES = ("trainer", "peer", "cache")
"""Of weights."""


class GeneratorStatus:
    """Reads loop, link and recorder when it is asked for; while the model is loaded there is only the recorder."""

    def __init__(self, recorder: Recorder, *, metrics: WallMetrics) -> None:
        self._loop: EngineLoop | None = None
        self._link: GeneratorLink | None = None
        self._recorder = recorder
        self._metrics = metrics
        self.served_bytes: Callable[[], int] = lambda: 0
        self._weights_bytes = dict.fromkeys(_SOURCES, 0)
        for source in _SOURCES:
            metrics.begin("weights_pulled_bytes", source)
        for part in PullTimes().seconds():
            metrics.begin("weights_pull_part_seconds", part)
        for part in get_args(LoadPart):
            metrics.begin("weights_load_part_seconds", part)
        self._delta_saved_bytes = self._delta_failures = 0

    def weights_arrived(self, size_bytes: int, *, source: str = "trainer") -> None:
        """So many bytes more of a version on its way."""
        self._metrics.add("weights_pulled_bytes", size_bytes, source)
        self._weights_bytes[source] += size_bytes

    def weights_pull_times(self, seconds: Mapping[str, float]) -> None:
        """Count the seconds of a pull, by part."""
        for part, spent_s in seconds.items():
            self._metrics.add("weights_pull_part_seconds", spent_s, part)

    def delta_used(self, saved_bytes: int) -> None:
        """A tensor was made of the one before; so many bytes were not fetched."""
        self._metrics.add("weights_delta_saved_bytes", saved_bytes)
        self._delta_saved_bytes += saved_bytes

    def delta_failed(self) -> None:
        """A delta could not be used; its tensor is fetched."""
        self._metrics.add("weights_delta_failures", 1)
        self._delta_failures += 1

    def weights_taken(self, fetch_s: float, load_s: float, parts: Mapping[LoadPart, float]) -> None:
        """The engine has a version that took so long to arrive and to load; `parts` of the load, in seconds."""
        self._metrics.add("weights_pulled_versions", 1)
        self._metrics.observe("weights_pull_duration_seconds", fetch_s)
        self._metrics.observe("weights_load_duration_seconds", load_s)
        for part, seconds in parts.items():
            self._metrics.add("weights_load_part_seconds", seconds, part)

    def weights_failed(self) -> None:
        """A version did not arrive, or was refused."""
        self._metrics.add("weights_failures", 1)

    def attach(self, loop: EngineLoop, *, link: GeneratorLink) -> None:
        """From now on there is something to show."""
        self._loop, self._link = loop, link
        loop.on_weights, loop.on_weights_failed = self.weights_taken, self.weights_failed

    def signals(self) -> Signals:
        """The callbacks of the signals server."""
        return Signals(metrics=self._render, status=self._status, fault=self._fault)

    def _fault(self) -> str:
        if self._loop is None or self._link is None:
            return "the model is being loaded"
        now = self._loop.status()
        return self._link.ill() or now.weights_fault or ("" if now.version else "no weights have been loaded yet")

    def _render(self) -> bytes:
        if self._loop is not None:
            now = self._loop.status()
            self._metrics.set("generator_slots", self._loop.slots)
            self._metrics.set("generator_active", now.active)
            self._metrics.set("generator_waiting", now.waiting)
            self._metrics.set("generator_weights_step", now.version.step if now.version else None)
            self._metrics.total("generator_tokens", now.tokens)
            for name, tokens in _kv(now).items():
                self._metrics.set(name, math.nan if tokens is None else tokens)
        self._metrics.total("weights_served_bytes", self.served_bytes())
        self._recorder.refresh()
        return self._metrics.render() + (b"" if self._loop is None else self._loop.engine_metrics())

    def _status(self) -> dict[str, Any]:
        wall_s, parts = self._recorder.totals()
        wall = {"wall_s": wall_s, "parts": parts}
        if self._loop is None:
            return {"loading": True, **wall}
        now = self._loop.status()
        version = None if now.version is None else {"attempt": now.version.attempt, "step": now.version.step}
        return {
            "slots": self._loop.slots,
            "active": now.active,
            "waiting": now.waiting,
            "tokens": now.tokens,
            **_kv(now),
            "version": version,
            "weights_bytes": self._weights_bytes["trainer"],
            "weights_peer_bytes": self._weights_bytes["peer"],
            "weights_cached_bytes": self._weights_bytes["cache"],
            "weights_delta_saved_bytes": self._delta_saved_bytes,
            "weights_delta_failures": self._delta_failures,
            **wall,
        }


def _kv(now: EngineStatus) -> dict[str, int | None]:
    """None: the engine has no bound."""
    return {
        "kv_capacity_tokens": None if now.kv is None else now.kv.capacity_tokens,
        "kv_used_tokens": None if now.kv is None else now.kv.used_tokens,
    }
