"""Every process that has a heartbeat, frozen in a real run: each place that shows warnings shows it, and its end."""

import json
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from streamrl_cli.runner.folder import open_folder
from streamrl_cli.ui.state import read_status, run_warnings
from support.freezes import frozen, hearts
from support.jobs import simulated_job, write_prompts
from support.runs import LocalRun, streamrl, wait_for

BOUND_S = 45.0
"""Instead of 90 s: a notice after 15 s, and 30 s in which the process must be let go on."""
SILENT, ALIVE = "has shown no sign of life for", "shows signs of life again"
NAMES = {
    "scheduler": "scheduler",
    "trainer-0": "trainer-0",
    "generator-sim-0": "generator-sim-0",
    "agents-0": "agents-0",
    "scheduler.task-pool": "the task pool's fork server",
    "scheduler.ranker": "the ranker's process",
    "scheduler.tracker-tensorBoard": "the process of tracker tensorBoard",
    "agents-0.task-pool": "the fork server of agents",
}
"""Heartbeat file -> the name that people read. A process that is new here needs a way by which its silence is shown."""
PROGRAM = """
import json, os, sys, time, urllib.request
from pathlib import Path

item = json.load(sys.stdin)
while not Path(__file__).with_name("let_go").exists():
    time.sleep(0.1)
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
body = json.dumps({"messages": [{"role": "user", "content": item["question"]}]}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""


def job() -> dict[str, Any]:
    """With everything that has a process of its own; its programs wait until the test lets them go on."""
    made: dict[str, Any] = simulated_job(steps=3, replicas=1)
    made["spec"]["task"] |= {
        "agent": {
            "command": ["python", "-S", "agent.py"],
            "sessions": 6,
            "timeoutSeconds": 3600,
            "pool": {"scaling": {"static": {"replicas": 1}}},
        },
        "rewards": [{"name": "game", "environment": {}}],
    }
    made["spec"]["scheduling"] = {"lengthSignals": ["Ranker"], "ranker": {"hashing": {}}}
    made["spec"]["trackers"] = {"tensorBoard": {}}
    return made


class Places:
    """Where a person looks, of one run."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def page(self) -> list[str]:
        """The scheduler's status, which the operator, `top` and the pages read."""
        port = json.loads((self.run.folder / "endpoints/scheduler.json").read_text())["signals"]
        with urllib.request.urlopen(f"http://{port}/status", timeout=60) as page:
            return [one["message"] for one in json.loads(page.read())["warnings"] if one["type"] == "ProcessFrozen"]

    def metric(self) -> bool:
        port = json.loads((self.run.folder / "endpoints/scheduler.json").read_text())["signals"]
        with urllib.request.urlopen(f"http://{port}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        (line,) = [one for one in lines if one.startswith("streamrl_warning{") and 'type="ProcessFrozen"' in one]
        return float(line.rpartition(" ")[2]) == 1

    def top(self) -> str:
        done = streamrl("top", str(self.run.folder), "--once")
        return " ".join(done.stdout.replace("│", " ").split())

    def ui(self) -> list[str]:
        folder = open_folder(self.run.folder)
        return run_warnings(folder, read_status(folder))

    def wait_said(self, names: Collection[str], what: str) -> None:
        for name in names:
            self.run.wait_said(f"{name} {what}")


def named(messages: Collection[str]) -> set[str]:
    return {message.partition(f" {SILENT}")[0] for message in messages}


@pytest.mark.timeout(400)
def test_every_process_with_a_heartbeat_is_shown_when_it_freezes_and_when_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(BOUND_S))
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "agent.py").write_text(PROGRAM)
    run = LocalRun.start(job(), folder=tmp_path / "run", base_dir=tmp_path)
    places, root = Places(run), psutil.Process(run.process.pid)
    wait_for(lambda: hearts(root).keys() >= NAMES.keys() or run.process.poll() is not None, what=run.logs())
    found = hearts(root)
    assert found.keys() == NAMES.keys()
    beats = run.folder / "heartbeats"
    wait_for(lambda: all((beats / name).exists() for name in NAMES), what=f"first beats; {run.logs()}")
    others = {file: name for file, name in NAMES.items() if file != "scheduler"}
    # Parents are at work while their children are frozen, so that they can announce it; then the parents are.
    children = {file: name for file, name in others.items() if "." in file}
    parents = {file: name for file, name in others.items() if "." not in file}
    for silent in (children, parents):
        with frozen(*(found[file] for file in silent)):
            places.wait_said(silent.values(), SILENT)
            assert named(places.page()) == named(places.ui()) == set(silent.values())
            assert places.metric()
            shown = places.top()
            assert [name for name in silent.values() if f"warning: {name} {SILENT}" not in shown] == []
        places.wait_said(silent.values(), ALIVE)
        assert (places.page(), places.ui(), places.metric()) == ([], [], False)
    with frozen(found["scheduler"]):  # its page does not answer: the run folder has the notice
        places.wait_said(["scheduler"], SILENT)
        assert f"warning: scheduler {SILENT}" in places.top()
        assert named(places.ui()) == {"scheduler"}
    places.wait_said(["scheduler"], ALIVE)
    assert SILENT not in places.top()
    (tmp_path / "let_go").touch()
    assert run.wait_end() == 0, run.logs()
