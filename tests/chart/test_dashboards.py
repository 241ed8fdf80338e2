"""Every query of every dashboard and alert, asked of a real Prometheus that scrapes a real run; what operators export: tests/cluster."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import dashboards
from support.chart import Objects
from support.dashboards import BOARDS, ONLY_WHEN, Asked
from support.prometheus import Prometheus, scraping
from support.runs import LocalRun, wait_for

ENDLESS = 1_000_000
"""Steps: the run lasts until it is told to end."""
PROCESSES = ("scheduler", "trainer-0", "generator-tiny-0", "generator-tiny-1")
PROMPTS = 12
"""So few that each comes again: past lengths predict it."""

START_S = 300.0
"""For a model, its warm-up and four processes with torch, on a machine that builds something else beside it."""

pytestmark = pytest.mark.timeout(900)


def job() -> dict[str, Any]:
    """The smallest that trains a model: rewards that differ, so that there is a gradient, an entropy, a clip."""
    sizes = {"hiddenSize": 32, "layers": 1, "heads": 2, "intermediateSize": 64, "maxPositions": 64}
    task = {
        "dataset": {"jsonl": {"path": "prompts.jsonl"}},
        "groupSize": 4,
        "sampling": {"maxTokens": 24},
        "rewards": [{"name": "digit", "regex": {"pattern": "[05]"}}],
        "evaluation": {"maxPrompts": 4, "intervalSteps": 4},
    }
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"scratch": {**sizes, "warmUp": {"steps": 20, "batchSize": 8}}},
            "task": task,
            "pipeline": {"mode": "StreamAsync", "maxStalenessSteps": 1, "batchGroups": 4, "steps": ENDLESS},
            "scheduling": {"lengthSignals": ["History"]},
            "generators": [{"name": "tiny", "engine": {"hf": {"slots": 8}}, "scaling": {"static": {"replicas": 2}}}],
        },
    }


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    """A job at work."""
    lines = [json.dumps({"prompt": f"{n} + {n} = ", "answer": f"{2 * n}"}) for n in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    started = LocalRun.start(job(), folder=tmp_path / "run", base_dir=tmp_path)
    wait_for(lambda: started.steps() > 0, what=f"the first step; {started.logs()}", deadline_s=START_S)
    yield started
    started.interrupt()


@pytest.fixture
def scraped(run: LocalRun, prometheus: Path, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that reads the pages of all its processes."""
    files = [run.folder / f"endpoints/{name}.json" for name in PROCESSES]
    wait_for(lambda: all(file.exists() for file in files), what=f"all processes; {run.logs()}")
    with scraping({"streamrl": [json.loads(file.read_text())["signals"] for file in files]}, folder=tmp_path) as made:
        yield made


def test_every_query_and_alert_of_a_run_has_data(scraped: Prometheus, run: LocalRun) -> None:
    chosen = {"namespace": "local", "job": "tiny", "pool": "tiny", "operator": ".*"}
    everything = dict.fromkeys(chosen, ".*")
    asked = [one for variables in (chosen, everything) for one in dashboards.panel_queries(variables)]
    asked = [one for one in asked if not one.of_operator]
    told = dashboards.told(scraped, asked=asked, alerts=[one for one in dashboards.alerts() if not one.of_operator])
    assert told == [], run.logs()
    misspelt = Asked(board="none", title="none", expr="sum(rate(streamrl_trained_token_total[5m]))")
    assert list(dashboards.unknown(scraped, [misspelt])) == [
        f"streamrl_trained_token_total is exported by nobody: {misspelt}"
    ]


def test_what_may_be_empty_is_asked_for() -> None:
    """An entry of a metric that is gone would only be read, and believed."""
    asked = [one.expr for one in (*dashboards.panel_queries({}), *dashboards.alerts())]
    assert [metric for metric in ONLY_WHEN if not any(metric in expr for expr in asked)] == []


@pytest.mark.parametrize("uid", BOARDS)
def test_panels_say_what_to_do(uid: str) -> None:
    panels = [panel for panel in BOARDS[uid]["panels"] if panel["type"] != "row"]
    for panel in panels:
        good, _, otherwise = panel["description"].partition(" Otherwise: ")
        assert good.startswith("Good: "), panel["title"]
        assert otherwise.endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles))
    assert len({panel["id"] for panel in BOARDS[uid]["panels"]}) == len(BOARDS[uid]["panels"])


@pytest.mark.parametrize("uid", BOARDS)
def test_variables_are_used_and_there(uid: str) -> None:
    board = BOARDS[uid]
    variables = {one["name"] for one in board["templating"]["list"]}
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert board["uid"] == uid
    assert {name for name in variables if not any(f"${name}" in expr for expr in expressions)} == {"datasource"}
    for expr in expressions:
        assert "$" not in dashboards.expanded(expr, dict.fromkeys(variables, "x")), expr


def test_config_maps_hold_the_dashboards(objects: Callable[..., Objects]) -> None:
    found = [one for one in objects("--set", "dashboards.enabled=true") if "dashboard" in one["metadata"]["name"]]
    assert {one["kind"] for one in found} == {"ConfigMap"}
    assert all(one["metadata"]["labels"]["grafana_dashboard"] == "1" for one in found)
    held = {name: json.loads(text) for one in found for name, text in one["data"].items()}
    assert held == {f"{uid}.json": board for uid, board in BOARDS.items()}


def test_grafana_operators_objects_name_the_config_maps(objects: Callable[..., Objects]) -> None:
    switches = "dashboards.enabled=true,dashboards.grafanaOperator.enabled=true,dashboards.namespace=monitoring"
    found = [one for one in objects("--set", switches) if one["kind"] in ("ConfigMap", "GrafanaDashboard")]
    maps = {one["metadata"]["name"]: one for one in found if one["kind"] == "ConfigMap"}
    boards = [one for one in found if one["kind"] == "GrafanaDashboard"]
    assert len(boards) == len(BOARDS)
    for one in boards:
        named = one["spec"]["configMapRef"]
        assert named["key"] in maps[named["name"]]["data"]
        assert one["metadata"]["namespace"] == maps[named["name"]]["metadata"]["namespace"] == "monitoring"


def test_there_is_none_by_default(objects: Callable[..., Objects]) -> None:
    assert [one for one in objects() if "dashboard" in one["metadata"]["name"]] == []
