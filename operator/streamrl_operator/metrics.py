"""The operator's own pages, read-only: /healthz (the process answers), /readyz (it can do its work, or stands by while another does), and
/metrics in Prometheus' text format. `streamrl.metrics.OPERATOR` has each metric with its sentence.

What is said of a job is what its last reconcile wrote into its status; a job that is gone is forgotten.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from streamrl.metrics import OPERATOR
from streamrl_operator.kube.cache import Key
from streamrl_operator.planning.conditions import FAILED, READY, REASONS, SUCCEEDED
from streamrl_operator.planning.values import seconds_since
from streamrl_pages.metrics import Labels, MetricSet
from streamrl_pages.server import EndpointServer, health_response, metrics_response

_OTHER = "Other"
"""Label of a reason that `REASONS` does not have: Kubernetes may give any."""
_NO_WAIT = "NoPodsWanted"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(slots=True)
class _JobSeries:
    """Of one job."""

    conditions: dict[str, bool] = field(default_factory=dict)
    restarts: int = 0
    attempts: int = 0
    start_s: float | None = None
    waiting: dict[str, str] = field(default_factory=dict)
    """Pool, or nothing for the job -> the reason why its Ready is not True."""
    desired: dict[str, int] = field(default_factory=dict)
    ready: dict[str, int] = field(default_factory=dict)
    scaled: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(pool, direction) -> changes of `desired`."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Pool -> the member cluster that its pods are in; of others nothing."""
    certificates: Mapping[str, tuple[datetime, datetime]] = field(default_factory=dict)
    """Role -> when its certificate begins and ends."""

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

    def job(
        self,
        key: Key,
        status: Mapping[str, Any],
        *,
        clusters: Mapping[str, str],
        pools: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Take over the status of a job as it is written.

        Args:
            key: of the job.
            status: of the job.
            clusters: pool -> the member cluster that its pods are in.
            pools: pool -> its status; None: as before.
        """
        numbers = self._jobs.setdefault(key, _JobSeries())
        numbers.waiting = _waiting(status, {} if pools is None else pools) | (
            {pool: reason for pool, reason in numbers.waiting.items() if pool} if pools is None else {}
        )
        before_1970_s = seconds_since(status.get("startTime"), now=_EPOCH)
        numbers.start_s = None if before_1970_s is None else -before_1970_s
        numbers.attempts = status.get("attempt", 0)
        numbers.conditions = {one["type"]: one["status"] == "True" for one in status.get("conditions", ())}
        numbers.restarts, numbers.clusters = status.get("restarts", 0), clusters
        before, sizes = numbers.desired, status.get("pools", ())
        numbers.desired = {pool["name"]: pool["desired"] for pool in sizes}
        numbers.ready = {pool["name"]: pool["ready"] for pool in sizes}
        for name, desired in numbers.desired.items():
            was = before.get(name, desired)
            numbers.scaled[name, "up"] += desired > was
            numbers.scaled[name, "down"] += desired < was

    def certificates(self, key: Key, lives: Mapping[str, tuple[datetime, datetime]]) -> None:
        """Take over when the certificates of a job begin and end, by role."""
        self._jobs.setdefault(key, _JobSeries()).certificates = lives

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
        self._of_jobs("job_waiting", lambda job: dict.fromkeys(job.waiting.items(), 1))
        self._of_jobs("job_start_timestamp_seconds", lambda job: {} if job.start_s is None else {(): job.start_s})
        self._of_jobs("job_trainer_attempts", lambda job: {(): job.attempts})
        self._of_jobs("job_restarts", lambda job: {(): job.restarts})
        self._of_jobs("pool_desired_replicas", lambda job: job.by_place(job.desired))
        self._of_jobs("pool_ready_replicas", lambda job: job.by_place(job.ready))
        self._of_jobs("pool_scale_events", lambda job: job.scaled)
        ends, lives = "job_certificate_expiry_timestamp_seconds", "job_certificate_life_seconds"
        self._of_jobs(ends, lambda job: {(role,): end.timestamp() for role, (_, end) in job.certificates.items()})
        self._of_jobs(
            lives,
            lambda job: {(role,): (end - begin).total_seconds() for role, (begin, end) in job.certificates.items()},
        )
        return self._metrics.render()

    def _of_jobs(self, name: str, values: Callable[[_JobSeries], Mapping[Any, float]]) -> None:
        found: dict[Labels, float] = {}
        for key, numbers in self._jobs.items():
            found |= {(*key, *by): value for by, value in values(numbers).items()}
        self._metrics.replace(name, found)


def _waiting(status: Mapping[str, Any], pools: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Pool, or nothing for the job -> why its condition Ready is not True. A job that has ended waits for nothing."""
    if any(one["type"] in (SUCCEEDED, FAILED) and one["status"] == "True" for one in status.get("conditions", ())):
        return {}
    found = {
        name: one["reason"] if one["reason"] in REASONS else _OTHER
        for name, of in {"": status, **pools}.items()
        for one in of.get("conditions", ())
        if one["type"] == READY and one["status"] != "True"
    }
    return {name: reason for name, reason in found.items() if reason != _NO_WAIT}


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
