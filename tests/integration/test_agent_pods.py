"""Pods of agents: the operator's environment and certificates, a container with programs and a link beside it, a simulated engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl import keys
from streamrl.errors import EXIT_DONE
from streamrl_workers.metrics.jsonl import read_jsonl
from support.freezes import frozen, hearts
from support.jobs import simulated_job, write_prompts
from support.pods import Pods
from support.runs import wait_for

STEPS = 10
PROGRAM = """
import json, os, sys, urllib.request

def call(path, **body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

item = json.load(sys.stdin)
assert not [name for name in os.environ if name.startswith("STREAMRL_")], os.environ
messages = [{"role": "user", "content": item["question"]}]
for turn in range(1 + item["seed"] % 3):
    messages.append(call("/chat/completions", messages=messages)["choices"][0]["message"])
    messages.append({"role": "user", "content": "o" * (turn + 1)})
    call("/reward", reward=0.25)
"""


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    job: dict[str, Any] = simulated_job(steps=STEPS, staleness=1)
    job["metadata"]["namespace"] = "team"
    spec = job["spec"]
    spec["task"] |= {
        "code": {"configMapName": "code"},
        "agent": {
            "command": ["python", "-S", "agent.py"],
            "sessions": 6,
            "pool": {"scaling": {"static": {"replicas": 2}}},
        },
        "rewards": [{"name": "game", "environment": {}}],
    }
    spec["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.5}
    made = Pods.make(job, base=tmp_path / "pods")
    write_prompts(made.base / "prompts.jsonl")
    (made.base / "agent.py").write_text(PROGRAM)
    yield made
    made.close()


def kill_program_in(pods: Pods, container: str) -> None:
    """The container ends with its programs, as one that has filled its memory."""
    root = psutil.Process(pods.processes[container].pid)
    doomed = wait_for(lambda: root.children(recursive=True), what=f"processes of {container}; {pods.logs()}")
    for process in (*doomed, root):
        process.kill()
    pods.processes[container].wait()


@pytest.mark.timeout(400)
def test_pods_and_containers_are_lost_in_turns_and_every_sum_is_right(pods: Pods) -> None:
    pods.start("scheduler")
    first, second = pods.start_agents(0), pods.start_agents(1)
    pods.start_generator()
    pods.start("trainer")
    wait_for(lambda: (pods.numbers().get("agents") or {}).get("hosts") == 2, what=f"both hosts; {pods.logs()}")
    pods.wait_step(1)
    for name in second:  # a node is gone, and its pod comes back elsewhere
        pods.kill(name)
    pods.wait_step(2)
    pods.start_agents(1)
    pods.wait_step(3)
    kill_program_in(pods, first[0])
    pods.start("agents", pod=first[0].removesuffix("-agents"))
    pods.wait_step(4)
    assert pods.terminate(first[1]) == EXIT_DONE, pods.text(first[1])
    result = pods.wait_result()
    assert (result["status"], result["steps"]) == ("succeeded", STEPS), pods.logs()
    pods.assert_exact()
    steps = list(read_jsonl(pods.run_dir / keys.DIR_METRICS / "steps.jsonl"))
    assert [line["step"] for line in steps] == list(range(STEPS))
    for line in steps:
        assert line["reward_failed"] == 0, pods.logs()
        assert line["reward_mean"] == pytest.approx(0.25 * line["turns_mean"])
    page = pods.numbers()
    assert page["ended"], json.dumps(page)


@pytest.mark.timeout(400)
def test_a_frozen_process_beside_a_link_is_a_warning_of_the_scheduler(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(keys.ENV_LIVENESS_SECONDS, "45")
    pods.start("scheduler")
    first, _ = pods.start_agents(0)
    wait_for(lambda: (pods.numbers().get("agents") or {}).get("hosts") == 1, what=f"the host; {pods.logs()}")
    (server,) = hearts(psutil.Process(pods.processes[first].pid)).values()

    def silent() -> list[str]:
        return [one["message"] for one in pods.numbers()["warnings"] if one["type"] == "ProcessFrozen"]

    with frozen(server):
        (message,) = wait_for(silent, what=f"the warning; {pods.logs()}")
        assert message.startswith("agents-0: the fork server of the user's code has shown no sign of life for ")
    wait_for(lambda: not silent(), what=f"its end; {pods.logs()}")


def test_only_its_own_role_may_dial_as_an_agent_host(pods: Pods) -> None:
    pods.start("scheduler")
    pods.start("agents", pod=f"{pods.name}-agents-0")
    pods.start("link", pod=f"{pods.name}-agents-0", **{keys.ENV_TLS_DIR: str(pods.base / "tls" / "generator")})
    assert pods.wait(f"{pods.name}-agents-0-link") != EXIT_DONE
    assert "Agents is for agents" in pods.text(f"{pods.name}-agents-0-link")
