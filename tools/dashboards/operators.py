"""*Operator*: does it lead, is it behind, what does it fail at, and how are its jobs."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.shared import JOB, RANGE, Advice, Choice, Panel, Query, board, curves, number

UID = "streamrl-operator"
_OWN = 'job=~"$operator"'
_OPERATORS = Choice(name="operator", metric="streamrl_operator_leader", label="job")
_NAMESPACE = Choice(name="namespace", metric="streamrl_job_condition", label="namespace")
_JOBS = Choice(name="job", metric='streamrl_job_condition{namespace=~"$namespace"}', label="rljob")


def build() -> Dashboard:
    """Make it."""
    return board(
        UID,
        "StreamRL / Operator",
        says="The operator's own work, and the conditions of its jobs.",
        choices=(_OPERATORS, _NAMESPACE, _JOBS),
        sections={"Now": _now(), "Its work": _work(), "The API server": _requests(), "Its jobs": _jobs()},
    )


def _sum(name: str, **more: str) -> Query:
    return Query(expr=f"sum(streamrl_operator_{name}{{{_OWN}}})", **more)


def _rate(name: str, by: str, legend: str) -> Query:
    return Query(expr=f"sum by ({by}) (rate(streamrl_operator_{name}{{{_OWN}}}[{RANGE}]))", legend=legend)


def _quantile(name: str, at: float, by: str, legend: str) -> Query:
    buckets = f"sum by (le{by}) (rate(streamrl_operator_{name}_bucket{{{_OWN}}}[{RANGE}]))"
    return Query(expr=f"histogram_quantile({at}, {buckets})", legend=legend)


def _now() -> list[Panel]:
    return [
        number(
            "Leaders",
            _sum("leader"),
            says=Advice(
                good="1.", otherwise="0: no job is started, scaled or ended; the log says why (`lease not renewed`)."
            ),
        ),
        number(
            "Jobs due",
            _sum("queue_depth"),
            says=Advice(good="near 0.", otherwise="reconciles are slow or many: see their time, below."),
        ),
        number(
            "Objects in the caches",
            _sum("objects"),
            says=Advice(good="about 20 a job.", otherwise="its memory grows with them: raise resources.limits.memory."),
        ),
        number(
            "Jobs that cannot be read",
            _sum("unreachable_jobs"),
            says=Advice(
                good="0.", otherwise="their end is not seen, and they keep their GPUs: see the alert's runbook."
            ),
        ),
        number(
            "Namespaces refused",
            Query(expr=f"count(streamrl_operator_namespace_seen{{{_OWN}}} == 0) or vector(0)"),
            says=Advice(good="0.", otherwise="restore its Role and RoleBinding, or take it out of watchNamespaces."),
        ),
        number(
            "Restarts of kopf's watch, per hour",
            Query(expr=f"sum(increase(streamrl_operator_kopf_restarts_total{{{_OWN}}}[1h]))"),
            says=Advice(good="0.", otherwise="the API server ends watches: see its log, and the operator's."),
        ),
    ]


def _work() -> list[Panel]:
    return [
        curves(
            "Reconciles/s",
            Query(expr=f"sum(rate(streamrl_operator_reconciles_total{{{_OWN}}}[{RANGE}]))", legend="all"),
            _rate("reconcile_errors_total", "reason", "failed: {{reason}}"),
            unit="ops",
            says=Advice(good="none fails.", otherwise="the log has the error of each; the job's events have it too."),
        ),
        curves(
            "Time of a reconcile",
            _quantile("reconcile_seconds", 0.5, "", "median"),
            _quantile("reconcile_seconds", 0.99, "", "99 %"),
            unit="s",
            says=Advice(
                good="below a second.", otherwise="the API server is slow (below), or a scheduler does not answer."
            ),
        ),
    ]


def _requests() -> list[Panel]:
    return [
        curves(
            "Requests/s by answer",
            _rate("api_requests_total", "verb, code", "{{verb}} {{code}}"),
            unit="ops",
            says=Advice(
                good="200 and 201; 404 of a name that is free.",
                otherwise="403: a right is missing. 409: two writers. 429: the API server is full.",
            ),
        ),
        curves(
            "Time of a request, 99 %",
            _quantile("api_request_seconds", 0.99, ", verb", "{{verb}}"),
            unit="s",
            says=Advice(good="below a second.", otherwise="the API server or etcd is slow; jobs start and end late."),
        ),
    ]


def _jobs() -> list[Panel]:
    return [
        curves(
            "Conditions",
            Query(expr=f"sum by (type) (streamrl_job_condition{{{JOB}}})", legend="{{type}}"),
            says=Advice(
                good="Ready or Succeeded for each job.",
                otherwise="`kubectl describe rljob` has the reason and its message.",
            ),
        ),
        curves(
            "Restarts that count",
            Query(expr=f"sum by (namespace, rljob) (streamrl_job_restarts{{{JOB}}})", legend="{{namespace}}/{{rljob}}"),
            says=Advice(
                good="flat.", otherwise="at failurePolicy.maxRestarts the job fails: read the logs of what restarts."
            ),
        ),
        curves(
            "Certificates: time left",
            Query(
                expr=f"min by (namespace, rljob, role) (streamrl_job_certificate_expiry_timestamp_seconds{{{JOB}}}) - time()",
                legend="{{namespace}}/{{rljob}} {{role}}",
            ),
            unit="s",
            says=Advice(
                good="a saw that never reaches 0.",
                otherwise="the operator does not renew them: it leads not, or may not write Secrets.",
            ),
        ),
        curves(
            "Replicas missing",
            Query(
                expr=f"sum by (namespace, rljob, pool) (streamrl_pool_desired_replicas{{{JOB}}}) - "
                f"sum by (namespace, rljob, pool) (streamrl_pool_ready_replicas{{{JOB}}})",
                legend="{{namespace}}/{{rljob}} {{pool}}",
            ),
            says=Advice(good="0 but for a short time.", otherwise="pods are Pending or fail: events, quota, GPUs."),
        ),
    ]
