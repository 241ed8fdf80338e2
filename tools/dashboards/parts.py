"""PromQL that several dashboards share: shares of wall time, speeds, quantiles."""

from dashboards.shared import JOB, RANGE, Query

BUBBLE, WALL = "streamrl_bubble_seconds_total", "streamrl_wall_seconds_total"


def where_time_goes(role: str) -> Query:
    """The share of each part that there is, and of each cause, in the wall time of all processes of a role; they add up to 1."""
    who = f'{JOB},role="{role}"'
    parts = f"(sum by (part, cause) (rate({BUBBLE}{{{who}}}[{RANGE}])) > 0)"
    return Query(expr=f"{parts} / on () group_left () sum(rate({WALL}{{{who}}}[{RANGE}]))", legend="{{part}} {{cause}}")


def idle_share(by: str, who: str) -> str:
    """The share of wall time that is not `busy`, for each value of the labels `by`."""
    busy = f'sum by ({by}) (rate({BUBBLE}{{{who},part="busy"}}[{RANGE}]))'
    return f"1 - {busy} / sum by ({by}) (rate({WALL}{{{who}}}[{RANGE}]))"


def of_gpus(metric: str) -> str:
    """A metric of NVIDIA's dcgm-exporter, of the GPUs that the chosen jobs' pods hold. Without honorLabels Prometheus calls the pod `exported_pod`."""
    renamed = f'{metric}{{exported_pod!=""}}'
    for label in ("pod", "namespace"):
        renamed = f'label_replace({renamed}, "{label}", "$1", "exported_{label}", "(.+)")'
    return f'({renamed} or {metric}{{exported_pod=""}}) and on (namespace, pod) {WALL}{{{JOB}}}'


def of_scheduler(name: str, legend: str, *, by: str = "") -> Query:
    """What a job's scheduler measured last. One line, also where its pod was made again and has another `instance`."""
    return Query(expr=f"max by (namespace, rljob{by and f', {by}'}) (streamrl_{name}{{{JOB}}})", legend=legend)


def by_pool(expr: str) -> Query:
    """An expression by `pool`; what is the trainer's has none, and is called so."""
    return Query(expr=f'label_replace({expr}, "pool", "trainer", "pool", "")', legend="{{pool}}")


def quantiles(name: str, who: str, *, by: str = "") -> tuple[Query, Query]:
    """Median and 95th percentile of a histogram."""
    legend = "".join(f" {{{{{label}}}}}" for label in by.split())
    rate = f"sum by ({', '.join(['le', *by.split()])}) (rate({name}_bucket{{{who}}}[{RANGE}]))"
    median, high = (f"histogram_quantile({at}, {rate})" for at in (0.5, 0.95))
    return Query(expr=median, legend=f"median{legend}"), Query(expr=high, legend=f"95 %{legend}")
