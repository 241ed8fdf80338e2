"""What a worker tells on its signals port: metrics in Prometheus' text format, health, and its status as JSON. Read-only.

    GET /metrics   all names begin with `streamrl_` and stand in `streamrl.metrics`
    GET /healthz   200 ok | 503 with the reason
    GET /status    JSON (`/numbers` is its former path)
    GET /curves    JSON, of the scheduler: reward, speed and bubbles by step

Does not own how metrics are made and pages served (`streamrl_pages`), nor the values (callbacks).
Invariant: the key set of the bubbles is complete from the start, zeros included.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.metrics import MetricTable
from streamrl_pages.metrics import MetricSet
from streamrl_pages.server import EndpointServer, health_response, json_response, metrics_response
from streamrl_workers.metrics.bubbles import PARTS

_PIPELINE = "pipeline_"


class WallMetrics(MetricSet):
    """The metrics of a process whose wall time is told apart."""

    def __init__(self, table: MetricTable, *, common: Mapping[str, str]) -> None:
        super().__init__(table, common=common)
        self.bubbles(parts={}, wall_s=0.0)

    def bubbles(self, *, parts: Mapping[str, float], wall_s: float) -> None:
        """Take over cumulative seconds."""
        for part in PARTS:
            cause = part.removeprefix(_PIPELINE) if part.startswith(_PIPELINE) else ""
            self.total("bubble_seconds", parts.get(part, 0.0), "pipeline" if cause else part, cause)
        self.total("wall_seconds", wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What the signals port tells; the callbacks are called in the server's loop and must be quick."""

    metrics: Callable[[], bytes]
    status: Callable[[], Mapping[str, Any]]
    fault: Callable[[], str] = lambda: ""  # "" = healthy, else why not
    curves: Callable[[], Mapping[str, Any]] | None = None  # None: the process has none


class SignalsServer(EndpointServer):
    """Serves `Signals` in the running loop."""

    def __init__(self, signals: Signals) -> None:
        status = lambda: json_response(signals.status())  # noqa: E731 - served under two paths
        pages = {
            "/metrics": lambda: metrics_response(signals.metrics()),
            "/healthz": lambda: health_response(signals.fault()),
            "/status": status,
            "/numbers": status,  # the path that operators of earlier releases ask for
        }
        if (curves := signals.curves) is not None:
            pages["/curves"] = lambda: json_response(curves())
        super().__init__(pages)
