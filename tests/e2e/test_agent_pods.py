"""Programs in pods of their own: they play, reach nothing of the job's but the scheduler's port, and may be lost. Looked at from inside."""

import json

import pytest

from cluster.operators import Operator
from e2e.jobs import prompts, simulated, small_pod
from e2e.stage import Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = "played"
STEPS = 30
SLOW_S = 600.0
"""On a machine that does other things beside it: each sample is a program that starts."""
AGENT = """
import glob, json, os, sys, urllib.request

SECRET = ("tls.key", "tls.crt", "ca.crt", "journal.sqlite", "token", "job.json")
OURS = ("/usr", "/lib", "/opt", "/sys", "/work", "/root", "/nix")

def call(path, **body):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))

def files():
    for top in os.listdir("/"):
        if f"/{top}" not in OURS and top != "proc":
            for folder, _, names in os.walk(f"/{top}"):
                yield from (f"{folder}/{name}" for name in names if name in SECRET)

def processes():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            said = open(path, "rb").read()
        except OSError:
            continue
        if b"agent_link" in said:
            yield f"{path}: {said!r}"

def plants():
    for folder in ("/etc/streamrl/code", "/var/lib/streamrl", "/var/lib/streamrl/run"):
        try:
            open(f"{folder}/planted.py", "w").close()
        except OSError:
            continue
        yield f"{folder} can be written"

item = json.load(sys.stdin)
messages = [{"role": "user", "content": item["question"]}]
for turn in range(2):
    messages.append(call("/chat/completions", messages=messages)["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
found = [*files(), *processes(), *plants(), *(name for name in os.environ if name.startswith("STREAMRL_"))]
call("/reward", reward=1.0 + len(found))
if found:
    call("/end", error=f"reached {found}")
"""
REACH = """
import json, socket, sys
def opens(address, port):
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True
print(json.dumps([name for name, address, port in json.loads(sys.argv[1]) if opens(address, port)]))
"""


def test_programs_reach_no_key_and_a_lost_pod_costs_a_replay(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    code = prompts(stage.namespace)
    code["data"]["agent.py"] = AGENT
    job = simulated(JOB, steps=STEPS, step_s=1.0, replicas=1)
    job["spec"]["task"] |= {
        "agent": {
            "command": ["python", "-S", "agent.py"],
            "sessions": 8,
            "pool": {"scaling": {"static": {"replicas": 2}}, "pod": small_pod()},
        },
        "rewards": [{"name": "game", "environment": {}}],
    }
    stage.apply(code, job)
    stage.wait_step(JOB, 1)
    pod = f"{names.pool(JOB, names.AGENTS)}-0"
    assert reached(stage, pod) == ["trainer:grpc"]
    stage.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
    step = stage.page(JOB).get("step", 0)
    stage.wait_step(JOB, step + 2)
    stage.wait_for(
        lambda: (stage.page(JOB).get("agents") or {}).get("hosts") == 2, "the pod's successor to be linked", job=JOB
    )
    stage.wait_succeeded(JOB, deadline_s=SLOW_S)
    stage.assert_exact(JOB)
    steps = (stage.run_dir(JOB) / "metrics" / "steps.jsonl").read_text().splitlines()
    found = {(json.loads(line)["reward_mean"], json.loads(line)["reward_failed"]) for line in steps}
    assert found == {(1.0, 0)}, operator.tail()


def reached(stage: Stage, pod: str) -> list[str]:
    """Ports of the job's other pods that the programs' container can open."""
    stage.nodes.the_node.wait_policies()
    address = {name: found["status"]["podIP"] for name, found in stage.pods(JOB).items()}
    trainer, generator = address[f"{names.trainer(JOB)}-0"], address[f"{names.pool(JOB, 'sim')}-0"]
    aims = [
        ("trainer:grpc", trainer, names.PORT_GRPC),
        ("trainer:weights", trainer, names.PORT_WEIGHTS),
        ("trainer:signals", trainer, names.PORT_SIGNALS),
        ("generator:weights", generator, names.PORT_WEIGHTS),
        ("generator:signals", generator, names.PORT_SIGNALS),
    ]
    arguments = ("exec", pod, "--container", names.CONTAINER_AGENTS, "--", "python", "-I", "-c", REACH)
    said = stage.kubectl(*arguments, json.dumps(aims))
    opened: list[str] = json.loads(said.splitlines()[-1])
    return opened
