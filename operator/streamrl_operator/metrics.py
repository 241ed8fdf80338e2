"""The operator's own pages, read-only: /healthz (the process answers), /readyz (it can do its work, or stands by while another does), and
/metrics in Prometheus' text format. `streamrl.metrics.OPERATOR` has each metric with its sentence.

What is said of a job is what its last reconcile wrote into its status; a job that is gone is forgotten.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from streamrl.metrics import OPERATOR
from streamrl_operator.kube.cache import Key
from streamrl_pages.metrics import Labels, MetricSet
from streamrl_pages.server import EndpointServer, health_response, metrics_response


@dataclass(slots=True)
class _JobSeries:
    """Of one job."""

    conditions: dict[str, bool] = field(default_factory=dict)
    restarts: int = 0
    desired: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    scaled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(pool, direction) -> changes of `desired`."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Pool -> the member cluster that its pods are in; of others nothing."""
    certificates: dict[str, float] = field(default_factory=dict)

    def by_place(self, numbers: Mapping[str, int]) -> dict[Labels, float]:
        """By pool and cluster."""
        return {(pool, self.clusters.get(pool, "")): number for pool, number in numbers.items()}


class OperatorMetrics:
    """What one operator counts."""

    def __init__(self) -> None:
        self._metrics = MetricSet(OPERATOR)
        self._metrics.set("operator_leader", 0)
        self._read: dict[str, Callable[[], float | Mapping[str, float]]] = {}
        self._jobs: dict[Key, _JobSeries] = {}

    def reconciled(self, error: str, *, seconds: float) -> None:
        """A reconcile has ended; `error`: why it failed, empty if it did not."""
        self._metrics.add("operator_reconciles", 1)
        self._metrics.observe("operator_reconcile_seconds", seconds)
        if error:
            self._metrics.add("operator_reconcile_errors", 1, error)

    def requested(self, verb: str, resource: str, status: int, seconds: float) -> None:
        """A request has ended."""
        self._metrics.add("operator_api_requests", 1, verb, resource, str(status))
        if verb != "watch":
            self._metrics.observe("operator_api_request_seconds", seconds, verb)

    def leading(self, is_leader: bool) -> None:  # noqa: FBT001 - as it is told
        """Whether this process acts."""
        self._metrics.set("operator_leader", int(is_leader))

    def seen(self, namespace: str, is_whole: bool) -> None:  # noqa: FBT001 - as it is told
        """Whether all of a namespace is known."""
        self._metrics.set("operator_namespace_seen", int(is_whole), namespace)

    def read(self, name: str, value: Callable[[], float | Mapping[str, float]]) -> None:
        """A gauge, or a counter's total, that is read when somebody asks; of one with a label, by the label's value."""
        self._read[name] = value

    def job(self, key: Key, status: Mapping[str, Any], *, clusters: Mapping[str, str]) -> None:
        """The status of a job as it is written. `clusters`: pool -> the member cluster that its pods are in."""
        numbers = self._jobs.setdefault(key, _JobSeries())
        numbers.conditions = {one["type"]: one["status"] == "True" for one in status.get("conditions", ())}
        numbers.restarts, numbers.clusters = status.get("restarts", 0), clusters
        before, pools = numbers.desired, status.get("pools", ())
        numbers.desired = {pool["name"]: pool["desired"] for pool in pools}
        numbers.ready = {pool["name"]: pool["ready"] for pool in pools}
        for name, desired in numbers.desired.items():
            was = before.get(name, desired)
            numbers.scaled[name, "up"] += desired > was
            numbers.scaled[name, "down"] += desired < was

    def certificates(self, key: Key, ends: Mapping[str, datetime]) -> None:
        """When the certificates of a job end, by role."""
        numbers = self._jobs.setdefault(key, _JobSeries())
        numbers.certificates = {role: end.timestamp() for role, end in ends.items()}

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._jobs.pop(key, None)

    def page(self) -> bytes:
        """All of them, as text."""
        for name, value in self._read.items():
            write = self._metrics.set if OPERATOR.specs[name].type == "gauge" else self._metrics.total
            found = value()
            by_labels = {(by,): found[by] for by in found} if isinstance(found, Mapping) else {(): found}
            for by, number in by_labels.items():
                write(name, number, *by)
        self._of_jobs("job_condition", lambda job: {(kind,): holds for kind, holds in job.conditions.items()})
        self._of_jobs("job_restarts", lambda job: {(): job.restarts})
        self._of_jobs("pool_desired_replicas", lambda job: job.by_place(job.desired))
        self._of_jobs("pool_ready_replicas", lambda job: job.by_place(job.ready))
        self._of_jobs("pool_scale_events", lambda job: job.scaled)
        ends = "job_certificate_expiry_timestamp_seconds"
        self._of_jobs(ends, lambda job: {(role,): end for role, end in job.certificates.items()})
        return self._metrics.render()

    def _of_jobs(self, name: str, values: Callable[[_JobSeries], Mapping[Any, float]]) -> None:
        found: dict[Labels, float] = {}
        for key, numbers in self._jobs.items():
            found |= {(*key, *by): value for by, value in values(numbers).items()}
        self._metrics.replace(name, found)


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
