"""The operator's own metrics, in Prometheus' text format; all begin with `streamrl_operator_`."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

_PREFIX = "streamrl_operator"
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """What one operator counts."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # half of the page, and nobody looks at when a counter was made
        self._registry = CollectorRegistry()
        self._looks = self._counter("reconciles", "Looks at a job.")
        self._seconds = Histogram(
            "reconcile_seconds",
            "Time of a look.",
            namespace=_PREFIX,
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._errors = self._counter("reconcile_errors", "Looks that failed, by reason.", "reason")
        self._requests = self._counter("api_requests", "Requests to the API server.", "verb", "resource", "code")
        self._request_seconds = Histogram(
            "api_request_seconds",
            "Time of a request that is no watch.",
            ("verb",),
            namespace=_PREFIX,
            registry=self._registry,
            buckets=_BUCKETS,
        )
        self._leader = Gauge("leader", "1 while this process acts.", namespace=_PREFIX, registry=self._registry)
        self._leader.set(0)
        self._seen = Gauge(
            "namespace_seen",
            "1 for a namespace that this process follows, 0 for one that the API server refuses to show. Empty name: all.",
            ("watched",),  # a scrape adds a `namespace` of its own
            namespace=_PREFIX,
            registry=self._registry,
        )

    def looked(self, error: str, *, seconds: float) -> None:
        """A look has ended; `error`: why it failed, empty if it did not."""
        self._looks.inc()
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

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A number that is read when somebody asks."""
        Gauge(name, help_text, namespace=_PREFIX, registry=self._registry).set_function(read)

    def page(self) -> bytes:
        """All of them, as text."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(name, help_text, labels, namespace=_PREFIX, registry=self._registry)
