"""What a worker tells on its signals port: metrics in Prometheus' text format, health, and its status as JSON. Read-only.

    GET /metrics   all names begin with `streamrl_`; each `ProcessMetrics` has a registry of its own
    GET /healthz   200 ok | 503 with the reason
    GET /status    JSON (`/numbers` is its former path)

Does not own how pages are served (`streamrl_pages`), nor the values (callbacks).
Invariant: the key set of the bubbles is complete from the start, zeros included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from streamrl_pages.server import EndpointServer, health_response, json_response, metrics_response
from streamrl_workers.metrics.bubbles import PARTS

_PREFIX = "streamrl"
_PIPELINE = "pipeline_"


class ProcessMetrics:
    """The metrics of one process."""

    def __init__(self, *, role: str, process: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"role": role, "process": process}
        self._seconds = Counter(
            "bubble_seconds",
            "Wall time by part.",
            (*self._labels, "part", "cause"),
            namespace=_PREFIX,
            registry=self._registry,
        )
        self._wall_seconds = self.counter("wall_seconds", help_text="Wall time.")
        self._told: dict[str, float] = {}
        self.bubbles(parts={}, wall_s=0.0)

    def bubbles(self, *, parts: Mapping[str, float], wall_s: float) -> None:
        """Take over cumulative seconds."""
        for part in PARTS:
            cause = part.removeprefix(_PIPELINE) if part.startswith(_PIPELINE) else ""
            child = self._seconds.labels(**self._labels, part="pipeline" if cause else part, cause=cause)
            child.inc(self._gain(part, parts.get(part, 0.0)))
        self._wall_seconds.inc(self._gain("wall", wall_s))

    def counter(self, name: str, *, help_text: str) -> Counter:
        """A counter `streamrl_<name>_total` with this process's labels."""
        counter = Counter(name, help_text, tuple(self._labels), namespace=_PREFIX, registry=self._registry)
        return counter.labels(**self._labels)

    def counts(
        self, name: str, *, key: str, keys: Sequence[str], help_text: str
    ) -> Callable[[Mapping[str, float]], None]:
        """Counters `streamrl_<name>_total`, one for each of `keys` under the label `key`, all there from the start.

        Returns what takes over cumulative counts by key.
        """
        counter = Counter(name, help_text, (*self._labels, key), namespace=_PREFIX, registry=self._registry)
        children = {one: counter.labels(**self._labels, **{key: one}) for one in keys}

        def take(totals: Mapping[str, float]) -> None:
            for one, child in children.items():
                child.inc(self._gain(f"{name}/{one}", totals.get(one, 0)))

        return take

    def gauge(self, name: str, *, help_text: str) -> Gauge:
        """A gauge `streamrl_<name>` with this process's labels."""
        gauge = Gauge(name, help_text, tuple(self._labels), namespace=_PREFIX, registry=self._registry)
        return gauge.labels(**self._labels)

    def gauges(
        self, name: str, *, keys: Sequence[str], help_text: str
    ) -> Callable[[Mapping[tuple[str, ...], float]], None]:
        """Gauges `streamrl_<name>` with the labels `keys`. Returns what takes over all there are, by the labels' values."""
        gauge = Gauge(name, help_text, (*self._labels, *keys), namespace=_PREFIX, registry=self._registry)

        def take(values: Mapping[tuple[str, ...], float]) -> None:
            gauge.clear()
            for labels, value in values.items():
                gauge.labels(**self._labels, **dict(zip(keys, labels, strict=True))).set(value)

        return take

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def _gain(self, key: str, total: float) -> float:
        """What `total` grew by; never negative, as counters only rise."""
        gain = max(0.0, total - self._told.get(key, 0.0))
        self._told[key] = max(total, self._told.get(key, 0.0))
        return gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the signals port tells; the callbacks are called in the server's loop and must be quick."""

    metrics: Callable[[], bytes]
    status: Callable[[], Mapping[str, Any]]
    fault: Callable[[], str] = lambda: ""  # "" = healthy, else why not


class SignalsServer(EndpointServer):
    """Serves `Signals` in the running loop."""

    def __init__(self, signals: Signals) -> None:
        status = lambda: json_response(signals.status())  # noqa: E731 - served under two paths
        super().__init__(
            {
                "/metrics": lambda: metrics_response(signals.metrics()),
                "/healthz": lambda: health_response(signals.fault()),
                "/status": status,
                "/numbers": status,  # the path that operators of earlier releases ask for
            }
        )
