"""The dashboards and alerts of the chart as a test asks them: every query, its variables expanded, and what may be without data."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ruamel.yaml import YAML

from streamrl.metrics import OPERATOR
from support.chart import CHART
from support.prometheus import SCRAPE_S, Prometheus

BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files/dashboards").glob("*.json"))}
OPERATOR_JOB = "streamrl-system/streamrl"
DATA_S = 240.0
GPU_METRICS = {f"DCGM_FI_DEV_{name}" for name in ("GPU_UTIL", "FB_USED", "FB_FREE", "XID_ERRORS")}
"""Of NVIDIA's dcgm-exporter."""
FOREIGN = {"up", *GPU_METRICS}
"""What Prometheus itself, and other exporters say."""
ONLY_WHEN = {
    **dict.fromkeys(GPU_METRICS, "dcgm-exporter runs in the cluster"),
    "streamrl_cost_per_reward_point": "held-out reward is higher than at first",
    'streamrl_job_waiting{reason="Unschedulable"}': "a pod finds no node",
    "streamrl_mfu_ratio": "the peak of the trainer's device is known",
    "streamrl_operator_cluster_connected": "there is an RLCluster",
    "streamrl_operator_reconcile_errors_total": "a reconcile has failed",
}
"""Metric, or a selector -> when it has data; a healthy run may give it none. Each is made true once: in tests/chart/test_alerts_in_runs.py, test_dashboards.py,
tests/cluster/test_alerts.py, tests/cluster/test_members_lost.py and tests/unit/workers/scheduler/server/test_status_endpoint.py."""
_HISTOGRAM = re.compile("_(bucket|sum|count)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A query of a panel, or an alert's expression."""

    board: str
    title: str
    expr: str

    @property
    def of_operator(self) -> bool:
        """Whether it reads what the operator exports, or asks about its target."""
        return OPERATOR_JOB in self.expr or any(spec.name in self.expr for spec in OPERATOR.specs.values())

    @property
    def may_be_empty(self) -> bool:
        """Whether it reads what a healthy run may not have."""
        return any(metric in self.expr for metric in ONLY_WHEN)

    def __str__(self) -> str:
        return f"{self.board}, {self.title}: {self.expr}"


def panel_queries(variables: Mapping[str, str]) -> Iterator[Asked]:
    """All queries of all panels."""
    for uid, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                yield Asked(board=uid, title=panel["title"], expr=expanded(target["expr"], variables))


def panels_that_may_be_empty(where: Callable[[Asked], bool]) -> set[str]:
    """ "BOARD, PANEL" of those of which every query may be, or is of `where`."""
    full = {(one.board, one.title) for one in panel_queries({}) if not (one.may_be_empty or where(one))}
    return {f"{one.board}, {one.title}" for one in panel_queries({}) if (one.board, one.title) not in full}


def alerts() -> Iterator[Asked]:
    """All alerts."""
    text = (
        (CHART / "files/rules.yaml")
        .read_text()
        .replace("OPERATOR_JOB", OPERATOR_JOB)
        .replace("CHECKPOINT_SECONDS", "21600")
    )
    for group in YAML(typ="safe").load(text)["groups"]:
        for rule in group["rules"]:
            yield Asked(board=group["name"], title=rule["alert"], expr=rule["expr"])


def expanded(expr: str, variables: Mapping[str, str]) -> str:
    """As Grafana sends it. The windows are longer than the tests' run: all that was scraped counts."""
    own = {"__rate_interval": "5m", "__range": "5m"} | variables
    for name in sorted(own, key=len, reverse=True):
        expr = expr.replace(f"${name}", own[name])
    return expr


def told(prometheus: Prometheus, *, asked: Sequence[Asked], alerts: Sequence[Asked]) -> list[str]:
    """What is wrong: queries without data, alerts whose metrics have none, and names that are on no page.

    An alert that gives data is one that fires: what it reads is asked instead.
    """
    by_expr = {one.expr: str(one) for one in asked if not one.may_be_empty}
    by_expr |= {
        read.text: str(one) for one in alerts if not one.may_be_empty for read in prometheus.selectors(one.expr)
    }
    found = [f"no data for {expr}, of {by_expr[expr]}" for expr in _without_data(prometheus, list(by_expr))]
    return found + list(unknown(prometheus, (*asked, *alerts)))


def _without_data(prometheus: Prometheus, left: list[str]) -> list[str]:
    """Those that never have any before the deadline."""
    end = time.monotonic() + DATA_S
    while left and time.monotonic() < end:
        left = [expr for expr in left if not prometheus.has_data(expr)]
        time.sleep(SCRAPE_S)  # nothing is new before the next scrape
    return left


def unknown(prometheus: Prometheus, asked: Iterable[Asked]) -> Iterator[str]:
    """Metrics that are asked for and stand on no page."""
    known = prometheus.exported() | FOREIGN
    for one in asked:
        for name in {read.name for read in prometheus.selectors(one.expr)}:
            if name not in known and _HISTOGRAM.sub("", name) not in known:
                yield f"{name} is exported by nobody: {one}"
