"""Every query of every dashboard and alert, asked of a real Prometheus that scrapes real runs; what operators export: tests/cluster."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from ruamel.yaml import YAML

from support import dashboards
from support.chart import CHART, Objects
from support.dashboards import BOARDS, GPU_METRICS, ONLY_WHEN, Asked
from support.drawn_boards import PICTURES, drawn
from support.endpoints import say, serving
from support.jobs import simulated_job, tiny_job
from support.prometheus import Prometheus, scraping
from support.runs import LocalRun, wait_for

EXAMPLES = CHART.parents[1] / "examples"
ENDLESS = 1_000_000
"""Steps: the run lasts until it is told to end."""
PROMPTS = 12
"""So few that each comes again: past lengths predict it."""

START_S = 300.0
"""For a model, its warm-up and four processes with torch, on a machine that builds something else beside it."""

pytestmark = pytest.mark.timeout(900)


def job() -> dict[str, Any]:
    """A tiny one; for pictures the README's, with a smaller batch and more evaluations."""
    if not PICTURES:
        return tiny_job(steps=ENDLESS, replicas=2)
    made: dict[str, Any] = YAML(typ="safe", pure=True).load((EXAMPLES / "chain-sum.yaml").read_text())
    made["spec"]["pipeline"] |= {"steps": 1_000, "batchGroups": 16, "maxStalenessSteps": 2}
    made["spec"]["task"]["evaluation"] = {"maxPrompts": 64, "intervalSteps": 5}
    made["spec"]["generators"][0] |= {"engine": {"hf": {"slots": 32}}, "scaling": {"static": {"replicas": 2}}}
    return made


def job_beside() -> dict[str, Any]:
    """With two pools; its engines and trainer only count time."""
    engine = {"meanTokens": 30.0, "sigma": 0.8, "latency": [{"batch": 1, "milliseconds": 20.0}], "kvCacheTokens": 4096}
    made = simulated_job(steps=ENDLESS, staleness=2, **engine)
    near = made["spec"]["generators"][0]
    far = {
        "engine": {"simulated": {**near["engine"]["simulated"], "slots": 16}},
        "scaling": {"static": {"replicas": 1}},
    }
    made["spec"]["generators"] = [{**near, "name": "near"}, {**far, "name": "far"}]
    made["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.7}
    made["spec"]["maxCost"] = {"amount": "1000.00", "action": "Warn"}
    return made


@contextmanager
def at_work(job: dict[str, Any], *, base_dir: Path, prompts: Sequence[str]) -> Iterator[LocalRun]:
    """A run of it that has made a step."""
    (base_dir / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    started = LocalRun.start(job, folder=base_dir / "run", base_dir=base_dir)
    wait_for(lambda: started.steps() > 0, what=f"the first step; {started.logs()}", deadline_s=START_S)
    yield started
    started.interrupt()


def signals(run: LocalRun, job: dict[str, Any]) -> list[str]:
    """Where the processes of it are scraped."""
    pools = {pool["name"]: pool["scaling"]["static"]["replicas"] for pool in job["spec"]["generators"]}
    generators = [f"generator-{pool}-{number}" for pool, replicas in pools.items() for number in range(replicas)]
    files = [run.folder / f"endpoints/{name}.json" for name in ("scheduler", "trainer-0", *generators)]
    wait_for(lambda: all(file.exists() for file in files), what=f"all processes; {run.logs()}")
    return [json.loads(file.read_text())["signals"] for file in files]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    """A job at work."""
    lines = [json.dumps({"prompt": f"{n} + {n} = ", "answer": f"{2 * n}"}) for n in range(PROMPTS)]
    copy(EXAMPLES / "chain_sum.py", tmp_path)
    with at_work(job(), base_dir=tmp_path, prompts=lines) as started:
        yield started


@pytest.fixture
def scraped(run: LocalRun, prometheus: Path, tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus that reads the pages of all its processes, and of another job's."""
    beside = tmp_path / "beside"
    beside.mkdir()
    lines = [json.dumps({"prompt": f"question {n}", "answer": f"question {n}"}) for n in range(PROMPTS)]
    with at_work(job_beside(), base_dir=beside, prompts=lines) as other:
        pages = [*signals(run, job()), *signals(other, job_beside())]
        with scraping({"streamrl": pages}, folder=tmp_path) as made:
            yield made


def test_every_query_and_alert_of_a_run_has_data(scraped: Prometheus, run: LocalRun, tmp_path: Path) -> None:
    (pool,) = job()["spec"]["generators"]
    chosen = {"namespace": "local", "job": job()["metadata"]["name"], "pool": pool["name"], "operator": ".*"}
    everything = dict.fromkeys(chosen, ".*")
    asked = [one for variables in (chosen, everything) for one in dashboards.panel_queries(variables)]
    asked = [one for one in asked if not one.of_operator]
    told = dashboards.told(scraped, asked=asked, alerts=[one for one in dashboards.alerts() if not one.of_operator])
    assert told == [], run.logs()
    misspelt = Asked(board="none", title="none", expr="sum(rate(streamrl_trained_token_total[5m]))")
    assert list(dashboards.unknown(scraped, [misspelt])) == [
        f"streamrl_trained_token_total is exported by nobody: {misspelt}"
    ]
    boards = {uid: {**chosen, "pool": ".*"} for uid in BOARDS if uid != "streamrl-operator"}
    boards |= {"streamrl-jobs": everything, "streamrl-pools": {**everything, "job": "simulated"}}
    found = drawn(boards, prometheus=scraped, folder=tmp_path, minutes=6)
    assert set(found) <= dashboards.panels_that_may_be_empty(lambda one: one.of_operator)


def test_gpus_stand_beside_the_pods_that_hold_them(prometheus: Path, tmp_path: Path) -> None:
    """However the exporter is scraped: with honorLabels (sums-a-0), and without (sums-a-1). A GPU of another pod is not shown."""
    page = "".join(
        f'streamrl_wall_seconds_total{{namespace="ml",rljob="sums",role="generator",pod="sums-a-{number}"}} 60\n'
        + "".join(
            f'{metric}{{{prefix}namespace="{namespace}",{prefix}pod="sums-a-{number}",gpu="0"}} 1\n'
            for metric in sorted(GPU_METRICS)
            for namespace in ("ml", "other")
        )
        for number, prefix in enumerate(("", "exported_"))
    )
    queries = dashboards.panel_queries({"namespace": "ml", "job": "sums"})
    asked = [one.expr for one in queries if any(metric in one.expr for metric in GPU_METRICS)]

    def exports(handler: BaseHTTPRequestHandler, _: int) -> None:
        say(handler, 200, page, content_type="text/plain; version=0.0.4")

    with serving(exports) as exporter, scraping({"gpus": [exporter.url.split("/")[2]]}, folder=tmp_path) as watching:
        wait_for(lambda: all(map(watching.has_data, asked)), what=f"data for {asked}")
        assert [watching.values(expr) for expr in asked] == [[0.01, 0.01], [0.5, 0.5], [1, 1]]


def test_what_may_be_empty_is_asked_for() -> None:
    """An entry of a metric that is gone would only be read, and believed."""
    asked = [one.expr for one in (*dashboards.panel_queries({}), *dashboards.alerts())]
    assert [metric for metric in ONLY_WHEN if not any(metric in expr for expr in asked)] == []


def test_a_pod_that_is_made_again_goes_on_in_the_same_line() -> None:
    """It has another `instance`: every query adds up, or takes the largest or least."""
    joined = re.compile(r"\b(sum|avg|min|max|count) ?(by )?\(")
    assert [str(one) for one in dashboards.panel_queries({}) if not joined.search(one.expr)] == []


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
        left = dashboards.expanded(expr, dict.fromkeys(variables, "x")).replace('"$1"', "")  # of label_replace
        assert "$" not in left, expr


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
