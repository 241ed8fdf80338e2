"""Code of the user in a pod: it scores, and reaches nothing of the scheduler's. Looked at from inside."""

import json

import pytest

from cluster.operators import Operator
from e2e.jobs import prompts, simulated
from e2e.stage import Stage
from streamrl import names

pytestmark = [pytest.mark.node, pytest.mark.e2e, pytest.mark.timeout(900)]

JOB = "nosy"
REWARDS = '''
import glob, os

SECRET = ("tls.key", "tls.crt", "ca.crt", "journal.sqlite", "journal.sqlite-wal", "token", "job.json")
OURS = ("/usr", "/lib", "/opt", "/sys", "/work", "/root", "/nix")

def curious(*, prompt, completion, answer, metadata):
    """1 for what it must be able to do, more for each thing that it must not."""
    plant("/tmp/sitecustomize.py")
    found = [*files(), *processes(), *plants()]
    if found:
        print("REACHED", found, flush=True)
    return 1.0 + len(found)

def files():
    for top in os.listdir("/"):
        if f"/{top}" in OURS or top == "proc":
            continue
        for folder, _, names in os.walk(f"/{top}"):
            yield from (f"{folder}/{name}" for name in names if name in SECRET)

def processes():
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            said = open(f"{folder}/cmdline", "rb").read()
        except OSError:
            continue
        if b"scheduler" in said or b"trainer" in said:
            yield f"{folder}: {said!r}"
        for path in ("root/etc/streamrl/tls/tls.key", "root/var/lib/streamrl/run/journal.sqlite"):
            if os.path.exists(f"{folder}/{path}"):
                yield f"{folder}/{path}"

def plants():
    for folder in ("/etc/streamrl/code", "/var/lib/streamrl", "/var/lib/streamrl/run", "/var/lib/streamrl/shared"):
        if plant(f"{folder}/planted.py"):
            yield f"{folder} can be written"

def plant(path):
    try:
        open(path, "w").write("raise SystemExit(3)")
    except OSError:
        return False
    return True
'''


def test_it_reads_no_key_and_no_journal(watched: tuple[Stage, Operator]) -> None:
    stage, operator = watched
    code = prompts(stage.namespace)
    code["data"]["nosy.py"] = REWARDS
    job = simulated(JOB, steps=6)
    job["spec"]["task"]["rewards"] = [{"name": "it", "timeoutSeconds": 60, "python": {"function": "nosy:curious"}}]
    stage.apply(code, job)
    stage.wait_step(JOB, 1)
    pod = f"{names.trainer(JOB)}-0"
    said = stage.kubectl("logs", pod, "--container", names.CONTAINER_TASKS)
    assert "REACHED" not in said, said
    homes = {container: planted(stage, pod, container) for container in ("tasks", "scheduler", "trainer")}
    assert homes == {"tasks": True, "scheduler": False, "trainer": False}
    steps = stage.run_dir(JOB) / "metrics" / "steps.jsonl"
    rewards = [json.loads(line)["reward_mean"] for line in steps.read_text().splitlines()]
    assert rewards and set(rewards) == {1.0}, operator.tail()
    stage.wait_succeeded(JOB)
    stage.assert_exact(JOB)


def planted(stage: Stage, pod: str, container: str) -> bool:
    """Whether what the reward wrote to its home is in that container's."""
    look = "import os; print(os.path.exists('/tmp/sitecustomize.py'))"
    said = stage.kubectl("exec", pod, "--container", container, "--", "python", "-I", "-c", look)
    return said.split()[-1] == "True"
