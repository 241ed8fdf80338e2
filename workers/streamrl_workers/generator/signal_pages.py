"""What a generator shows on its signals port.

Owns: names of its gauges and numbers. Does not own: the server, the numbers.
"""

from typing import Any

from streamrl_workers.generator.link import Link
from streamrl_workers.generator.loop import EngineLoop
from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.recorder import Recorder
from streamrl_workers.metrics.signals import Pages


class GeneratorPages:
    """Reads loop, link and recorder when a page is asked for."""

    def __init__(self, loop: EngineLoop, *, link: Link, recorder: Recorder, metrics: Metrics) -> None:
        self._loop = loop
        self._link = link
        self._recorder = recorder
        self._metrics = metrics
        self._slots = metrics.gauge("generator_slots", help_text="Requests that can be active at once.")
        self._active = metrics.gauge("generator_active", help_text="Requests in a slot.")
        self._waiting = metrics.gauge("generator_waiting", help_text="Requests accepted, not yet in a slot.")
        self._step = metrics.gauge(
            "generator_weights_step", help_text="Weight version in the engine; absent weights: 0."
        )
        self._tokens = metrics.counter("generator_tokens", help_text="Tokens generated.")
        self._told_tokens = 0

    def pages(self) -> Pages:
        """The callbacks of the signals server."""
        return Pages(metrics=self._render, numbers=self._numbers, fault=lambda: self._link.fault)

    def _render(self) -> bytes:
        counts = self._loop.counts()
        self._slots.set(self._loop.slots)
        self._active.set(counts.active)
        self._waiting.set(counts.waiting)
        self._step.set(counts.version.step if counts.version else 0)
        self._tokens.inc(counts.tokens - self._told_tokens)
        self._told_tokens = counts.tokens
        self._recorder.refresh()
        return self._metrics.render()

    def _numbers(self) -> dict[str, Any]:
        counts = self._loop.counts()
        wall_s, parts = self._recorder.totals()
        version = None
        if counts.version is not None:
            version = {"attempt": counts.version.attempt, "step": counts.version.step}
        return {
            "slots": self._loop.slots,
            "active": counts.active,
            "waiting": counts.waiting,
            "tokens": counts.tokens,
            "version": version,
            "wall_s": wall_s,
            "parts": parts,
        }
