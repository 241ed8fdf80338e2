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
    """Reads loop, link and recorder when a page is asked for; while the model is loaded there is only the recorder."""

    def __init__(self, recorder: Recorder, *, metrics: Metrics) -> None:
        self._loop: EngineLoop | None = None
        self._link: Link | None = None
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
        self._weights = metrics.counter("generator_weights_bytes", help_text="Bytes of weights that have arrived.")
        self._weights_bytes = 0

    def weights_arrived(self, size_bytes: int) -> None:
        """So many bytes more of a version on its way."""
        self._weights.inc(size_bytes)
        self._weights_bytes += size_bytes

    def attach(self, loop: EngineLoop, *, link: Link) -> None:
        """From now on there is something to show."""
        self._loop, self._link = loop, link

    def pages(self) -> Pages:
        """The callbacks of the signals server."""
        return Pages(metrics=self._render, numbers=self._numbers, fault=self._fault)

    def _fault(self) -> str:
        return "the model is being loaded" if self._link is None else self._link.ill()

    def _render(self) -> bytes:
        if self._loop is not None:
            self._set(self._loop)
        self._recorder.refresh()
        return self._metrics.render()

    def _set(self, loop: EngineLoop) -> None:
        counts = loop.counts()
        self._slots.set(loop.slots)
        self._active.set(counts.active)
        self._waiting.set(counts.waiting)
        self._step.set(counts.version.step if counts.version else 0)
        self._tokens.inc(counts.tokens - self._told_tokens)
        self._told_tokens = counts.tokens

    def _numbers(self) -> dict[str, Any]:
        wall_s, parts = self._recorder.totals()
        if self._loop is None:
            return {"loading": True, "wall_s": wall_s, "parts": parts}
        counts = self._loop.counts()
        version = None
        if counts.version is not None:
            version = {"attempt": counts.version.attempt, "step": counts.version.step}
        return {
            "slots": self._loop.slots,
            "active": counts.active,
            "waiting": counts.waiting,
            "tokens": counts.tokens,
            "version": version,
            "weights_bytes": self._weights_bytes,
            "wall_s": wall_s,
            "parts": parts,
        }
