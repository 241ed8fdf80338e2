"""The operator's own pages, read-only: /healthz (the process answers), /readyz (it can do its work, or stands by while another does), and
/metrics in Prometheus' text format. All metrics begin with `streamrl_operator_`; `METRICS` has each with its sentence.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from streamrl_pages.server import EndpointServer, health_response, metrics_response

_PREFIX = "streamrl_operator"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


METRICS = {
    "api_request_seconds": "Time of a request that is no watch.",
    "api_requests": "Requests to the API server.",
    "leader": "1 while this process acts.",
    "namespace_seen": "1 for a namespace that this process follows, 0 for one that the API server refuses to show. Empty name: all.",
    "objects": "Objects in the caches.",
    "queue_depth": "Jobs that are due and wait for a worker.",
    "reconcile_errors": "Reconciles that failed, by reason.",
    "reconcile_seconds": "Time of a reconcile.",
    "reconciles": "Reconciles of jobs.",
    "unreachable_jobs": "Jobs whose scheduler's numbers cannot be read for minutes.",
}
"""Name -> what it says."""


class OperatorMetrics:
    """What one operator counts."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # half of the page, and nobody looks at when a counter was made
        self._registry = CollectorRegistry()
        self._reconciles = self._counter("reconciles")
        self._seconds = self._histogram("reconcile_seconds")
        self._errors = self._counter("reconcile_errors", "reason")
        self._requests = self._counter("api_requests", "verb", "resource", "code")
        self._request_seconds = self._histogram("api_request_seconds", "verb")
        self._leader = self._gauge("leader")
        self._leader.set(0)
        self._seen = self._gauge("namespace_seen", "watched")  # a scrape adds a `namespace` of its own

    def reconciled(self, error: str, *, seconds: float) -> None:
        """A reconcile has ended; `error`: why it failed, empty if it did not."""
        self._reconciles.inc()
        self._seconds.observe(seconds)
        if error:
            self._errors.labels(error).inc()

    def requested(self, verb: str, resource: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._requests.labels(verb, resource, str(status)).inc()
        if verb != "watch":
            self._request_seconds.labels(verb).observe(seconds)

    def leading(self, is_leader: bool) -> None:  # noqa: FBT001 - as it is told
        """Whether this process acts."""
        self._leader.set(int(is_leader))

    def seen(self, namespace: str, is_whole: bool) -> None:  # noqa: FBT001 - as it is told
        """Whether all of a namespace is known."""
        self._seen.labels(namespace).set(int(is_whole))

    def gauge(self, name: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody asks."""
        self._gauge(name).set_function(read)

    def page(self) -> bytes:
        """All of them, as text."""
        return generate_latest(self._registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(name, METRICS[name], labels, namespace=_PREFIX, registry=self._registry)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(name, METRICS[name], labels, namespace=_PREFIX, registry=self._registry)

    def _histogram(self, name: str, *labels: str) -> Histogram:
        return Histogram(name, METRICS[name], labels, namespace=_PREFIX, registry=self._registry, buckets=_BUCKETS)


@asynccontextmanager
async def serve_endpoints(
    *, host: str, port: int, metrics: OperatorMetrics, unready: Callable[[], str]
) -> AsyncIterator[int]:
    """Serve the pages inside the block; gives the port. `unready`: why it is not ready, empty if it is."""
    server = EndpointServer(
        {
            "/healthz": lambda: health_response(""),
            "/readyz": lambda: health_response(unready()),
            "/metrics": lambda: metrics_response(metrics.page()),
        }
    )
    bound = await server.start(host=host, port=port)
    try:
        yield bound
    finally:
        await server.close()
