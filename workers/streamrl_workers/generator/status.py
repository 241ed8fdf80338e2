"""What a generator shows on its signals port: names of its gauges, keys of its status. Does not own the server, the values."""

from typing import Any

from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.link import GeneratorLink
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.metrics.signals import ProcessMetrics, Signals


class GeneratorStatus:
    """Reads loop, link and recorder when it is asked for; while the model is loaded there is only the recorder."""

    def __init__(self, recorder: Recorder, *, metrics: ProcessMetrics) -> None:
        self._loop: EngineLoop | None = None
        self._link: GeneratorLink | None = None
        self._recorder = recorder
        self._metrics = metrics
        self._gauges = {
            name: metrics.gauge(f"generator_{name}", help_text=text)
            for name, text in (
                ("slots", "Requests that can be active at once."),
                ("active", "Requests in a slot."),
                ("waiting", "Requests accepted, not yet in a slot."),
                ("weights_step", "Weight version in the engine; absent weights: 0."),
            )
        }
        self._tokens = metrics.counter("generator_tokens", help_text="Tokens generated.")
        self._told_tokens = 0
        self._weights = metrics.counter("generator_weights_bytes", help_text="Bytes of weights that have arrived.")
        self._weights_bytes = 0

    def weights_arrived(self, size_bytes: int) -> None:
        """So many bytes more of a version on its way."""
        self._weights.inc(size_bytes)
        self._weights_bytes += size_bytes

    def attach(self, loop: EngineLoop, *, link: GeneratorLink) -> None:
        """From now on there is something to show."""
        self._loop, self._link = loop, link

    def signals(self) -> Signals:
        """The callbacks of the signals server."""
        return Signals(metrics=self._render, status=self._status, fault=self._fault)

    def _fault(self) -> str:
        if self._loop is None or self._link is None:
            return "the model is being loaded"
        return self._link.ill() or ("" if self._loop.status().version else "no weights have been loaded yet")

    def _render(self) -> bytes:
        if self._loop is not None:
            now = self._loop.status()
            step = now.version.step if now.version else 0
            for gauge, value in zip(
                self._gauges.values(), (self._loop.slots, now.active, now.waiting, step), strict=True
            ):
                gauge.set(value)
            self._tokens.inc(now.tokens - self._told_tokens)
            self._told_tokens = now.tokens
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
            "version": version,
            "weights_bytes": self._weights_bytes,
            **wall,
        }
