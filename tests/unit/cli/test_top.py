"""`streamrl top`: of a run folder, and of a job through an API server."""

import argparse
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.spec import parse_job
from streamrl_cli import top
from streamrl_cli.main import main
from streamrl_cli.runner.folder import RunFolder, create_folder
from support.api_answers import write_kubeconfig
from support.jobs import simulated_job

STEP = {"reward_mean": 0.25, "tokens_per_s": 1500.0, "samples_per_s": 3.0, "staleness_mean": 0.5, "staleness_max": 1}
GENERATOR = {
    "id": "generator-sim-0",
    "pool": "sim",
    "bubbles": {"busy": 3.0, "pipeline_no_prompts": 1.0},
    "wall_s": 4.0,
    "kv_capacity_tokens": 200,
    "kv_used_tokens": 50,
}
PAGE = {
    "queue": 17,
    "cost": 1.5,
    "generators": [GENERATOR],
    "trainer": {"id": "trainer-0", "bubbles": {"busy": 1.0}, "wall_s": 2.0},
    "scaling": {"pools": {"sim": {"generators": 1, "active": 6, "slots": 8, "tokens_per_s": 1234.0}}},
    "warnings": [{"type": "TrackerDown", "message": "tracker wandb: its process failed\x1b[2J"}],
    "last_step": STEP | {"step": 4, "elapsed_s": 2.0},
    "last_evaluation": {"step": 4, "mean_reward": 0.75, "prompts": 8},
}
SHOWN = ("step 5/20", "0.250", "0.750", "1.5k", "17", "0.50 (max 1 of 1)", "busy 75%", "6/8", "1.2k", "25%", "1.500")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path)
    lines = [STEP | {"step": step, "elapsed_s": 1.0 * step} for step in range(5)]
    made.file("metrics", "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made.file("metrics", "evaluations.jsonl").write_text(json.dumps(PAGE["last_evaluation"]) + "\n")
    return made


async def test_a_run_folder_is_shown_once_where_nobody_watches(
    folder: RunFolder, served: "Served", capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{served.server.host}:{served.server.port}"
    folder.file("endpoints", "scheduler.json").write_text(json.dumps({"signals": address}))
    shown, has_ended = await top._draw_folder(top.RunProgress(folder=folder))
    top.Console(width=110).print(shown)
    out = capsys.readouterr().out
    assert [text for text in SHOWN if text not in out] == []
    assert "warning: tracker wandb: its process failed" in out
    assert "\x1b" not in out
    assert not has_ended


def test_a_run_without_a_scheduler_shows_its_files(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.file("result.json").write_text('{"status": "succeeded"}')
    assert main(["top", str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert "step 5/20" in out
    assert "0.750" in out
    assert not [name for name in ("queue", "share of the wall") if name in out], "nobody says it"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["no/folder"], "no/folder: is no folder; name a run folder, or a job without its namespace"),
        ([".", "--interval", "0"], "--interval: must be at least 0.2, got 0.0"),
        ([".", "--interval", "nan"], "--interval: must be at least 0.2, got nan"),
    ],
)
def test_what_is_refused(args: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", *args]) == 2
    assert capsys.readouterr().err.strip() == line


class Served:
    """An API server with one job, and what its pods serve."""

    def __init__(self) -> None:
        self.may_ask_pods = True
        application = web.Application()
        application.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(application)
        job = simulated_job()
        meta = {"name": "simulated", "namespace": "ml", "uid": "u", "resourceVersion": "1", "generation": 1}
        conditions = [{"type": "Ready", "status": "True", "reason": "Running", "message": "all is well"}]
        self.job = job | {"metadata": meta, "status": {"conditions": conditions, "step": 5}}

    async def _answer(self, request: web.Request) -> web.Response:
        if request.path in ("/numbers", "/api/v1/namespaces/ml/pods/simulated-trainer-0:8080/proxy/status"):
            return web.json_response(PAGE, status=200 if self.may_ask_pods else 403)
        if request.path.endswith("/rljobs/simulated"):
            return web.json_response(self.job)
        kind = {"generatorpools": ("streamrl.io/v1alpha1", "GeneratorPoolList"), "pods": ("v1", "PodList")}
        version, name = kind.get(request.path.rsplit("/", 1)[-1], ("v1", "EventList"))
        return web.json_response(
            {"apiVersion": version, "kind": name, "metadata": {"resourceVersion": "1"}, "items": []}
        )


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    made = Served()
    await made.server.start_server()
    yield made
    await made.server.close()


def arguments(served: Served, tmp_path: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    return parser.parse_args(["simulated", f"--kubeconfig={write_kubeconfig(served.server, tmp_path)}"])


async def test_a_job_is_shown_by_its_schedulers_page(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await top.show_job(arguments(served, tmp_path))
    out = capsys.readouterr().out
    assert [text for text in SHOWN if text not in out] == []
    assert "ml/simulated" in out


async def test_a_pool_has_its_cluster_and_whether_that_is_reached(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.job["spec"]["generators"][0]["clusterName"] = "east"
    await top.show_job(arguments(served, tmp_path))
    line = next(line for line in capsys.readouterr().out.splitlines() if "1.2k" in line)
    assert "east" in line and "not reached" not in line
    lost = {"type": "ClusterUnreachable", "status": "True", "reason": "ClusterUnreachable"}
    served.job["status"]["conditions"].append(lost | {"message": "cluster east: no answer"})
    await top.show_job(arguments(served, tmp_path))
    out = capsys.readouterr().out
    assert "east (not reached)" in next(line for line in out.splitlines() if "1.2k" in line)
    assert "not reached: cluster east: no answer" in out


async def test_who_may_not_ask_a_pod_sees_the_status(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.may_ask_pods = False
    await top.show_job(arguments(served, tmp_path))
    out = capsys.readouterr().out
    assert "ml/simulated: Running - all is well" in out
    assert "step 5/20" in out
