"""A real Prometheus for tests: it scrapes what a test tells it, and answers PromQL."""

import json
import math
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.harness import tools
from cluster.harness.processes import Server
from support.chart import CHART
from support.ports import free_port
from support.runs import wait_for

READY_S = 120.0
ALERT_S = 300.0
"""Until an alert fires or clears, on a machine that builds something else beside it."""
ANSWER_S = 30.0
SCRAPE_S = 1
FASTER = 60
"""In tests of alerts an hour is a minute."""
_DURATION = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=offset )\d+[smh]|(?<=for: )\d+[smh]")
_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A metric that an expression reads, with its matchers."""

    name: str
    text: str


class Prometheus:
    """What a running one answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ready(self) -> bool:
        """Whether it serves."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=ANSWER_S) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def has_data(self, expr: str) -> bool:
        """Whether an expression gives a number now; NaN is none, but says that nothing was measured."""
        return any(map(math.isfinite, self.values(expr)))

    def values(self, expr: str) -> list[float]:
        """What an expression gives now."""
        return [float(one["value"][1]) for one in self._get("query", query=expr)["result"]]

    def wait_firing(self, *names: str) -> None:
        """Until all of these alerts fire."""
        wait_for(lambda: self.firing().issuperset(names), what=f"{names} to fire", deadline_s=ALERT_S)

    def wait_silent(self, *names: str) -> None:
        """Until none of these alerts fires."""
        wait_for(lambda: self.firing().isdisjoint(names), what=f"{names} to be silent", deadline_s=ALERT_S)

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {one["labels"]["alertname"] for one in self._get("alerts")["alerts"] if one["state"] == "firing"}

    def selectors(self, expr: str) -> list[Selector]:
        """All that an expression reads."""
        return list(_selectors(self._get("parse_query", query=expr)))

    def exported(self) -> set[str]:
        """Names of the metrics on the pages of what is scraped, those without a series too."""
        return {one["metric"] for one in self._get("targets/metadata")}

    def _get(self, path: str, **query: str) -> Any:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            return json.load(answer)["data"]


def chart_rules(*, operator_job: str = "", checkpoint_s: int = 21_600, by: int = FASTER) -> str:
    """The chart's, sooner; `operator_job`: what Prometheus calls an operator's target; `checkpoint_s`: the most of a checkpoint's age."""
    text = (CHART / "files/rules.yaml").read_text()
    return faster(text.replace("OPERATOR_JOB", operator_job).replace("CHECKPOINT_SECONDS", str(checkpoint_s)), by=by)


def faster(rules: str, *, by: int = FASTER) -> str:
    """Rules with windows and waits so many times shorter; nothing else is changed."""
    return _DURATION.sub(lambda found: f"{int(found[0][:-1]) * _UNIT_MS[found[0][-1]] // by}ms", rules)


@contextmanager
def scraping(targets: Mapping[str, Sequence[str]], *, folder: Path, rules: str = "") -> Iterator[Prometheus]:
    """A Prometheus, as long as the block lasts; `targets`: name of a scrape job -> addresses; `rules`: a file's text."""
    port = free_port()
    jobs = [{"job_name": name, "static_configs": [{"targets": list(them)}]} for name, them in targets.items()]
    interval = f"{SCRAPE_S}s"
    (folder / "alerts.yaml").write_text(rules)
    settings = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(folder / "alerts.yaml")],
        "scrape_configs": jobs,
    }
    config = folder / "prometheus.yaml"
    config.write_text(json.dumps(settings))  # YAML reads JSON
    command = (tools.tool("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}")
    bound = (f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn")
    server = Server("prometheus", (*command, *bound), log=folder / "prometheus.log", mark=f"prometheus-{port}")
    server.start()
    try:
        made = Prometheus(port)
        server.wait(made.ready, deadline_s=READY_S)
        yield made
    finally:
        server.stop()


def _selectors(node: Any) -> Iterator[Selector]:
    """Every vector selector below a node of a parsed expression."""
    if isinstance(node, list):
        for one in node:
            yield from _selectors(one)
    elif isinstance(node, dict):
        if node.get("type") in ("vectorSelector", "matrixSelector"):
            matchers = ",".join(f"{one['name']}{one['type']}{json.dumps(one['value'])}" for one in node["matchers"])
            yield Selector(name=node["name"], text=f"{{{matchers}}}")
        for value in node.values():
            yield from _selectors(value)
