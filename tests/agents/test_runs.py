"""A real `streamrl run` for each program of a real package: a small model that calls its tools, trained on what it sampled.

As in `tests/integration/test_agent_exactness.py` the trainer's log-probs are compared with the engine's, token by token.
"""

import json
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from streamrl_cli.yaml_document import read_value
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.scheduler.journal.sample_store import open_samples
from support.agent_programs import EXAMPLES, PROGRAM_S, PROGRAMS, PYTHON
from support.agent_runs import stored_turns
from support.jobs import simulated_job
from support.runs import COMMAND_S, LocalRun

STEPS = 2
WARM_UP_STEPS = 200
"""Enough to call tools, if with any arguments."""
RUN_S = 840.0
"""A run starts torch in four processes, on a machine that may be busy."""
IN_CI = ("with_openai_agents.py chat", "with_openai_agents.py responses", "with_verifiers.py")
"""Programs with a run in CI; the others play an item there (`test_programs.py`)."""
MAX_DIFF_NATS = 1e-4
"""Of the same token's log-prob in float32, with caches and in one forward."""


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the example's model and questions."""
    folder = tmp_path_factory.mktemp("apples")
    command = [sys.executable, EXAMPLES / "apples_model.py", folder, str(WARM_UP_STEPS)]
    subprocess.run(command, check=True, timeout=COMMAND_S)
    return folder


def small_job(made: Path, program: str) -> dict[str, Any]:
    """The example's job, of few samples, each in a process of its own."""
    job: dict[str, Any] = read_value((EXAMPLES / "apples.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    spec["model"] = {"path": {"directory": str(made / "apples-model")}}
    name, *arguments = program.split()
    spec["task"] |= {
        "dataset": {"jsonl": {"path": str(made / "apples.jsonl")}},
        "groupSize": 2,
        "agent": {
            "command": [str(PYTHON), str(EXAMPLES / name), *arguments],
            "maxTurns": 4,
            "sessions": 4,
            "timeoutSeconds": PROGRAM_S,
        },
        "evaluation": {"maxPrompts": 1, "intervalSteps": 1000},
    }
    spec["pipeline"] = {"mode": "StreamSync", "batchGroups": 2, "steps": STEPS}
    spec["trainer"] = {"learningRate": 1e-9}  # the weights stay: all tokens are compared under those that drew them
    return job


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "program", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.soak) for name in PROGRAMS]
)
def test_a_run_trains_on_what_the_program_heard(tmp_path: Path, made: Path, program: str) -> None:
    run = LocalRun.start(small_job(made, program), folder=tmp_path / "run", base_dir=tmp_path)
    assert run.process.wait(RUN_S) == 0, run.logs()
    run.assert_exact()
    lines = list(read_jsonl(run.folder / "metrics" / "steps.jsonl"))
    assert len(lines) == STEPS
    for line in lines:
        assert line["reward_failed"] == 0
        assert line["trainer"]["train_infer_logprob_diff_max"] < MAX_DIFF_NATS
    tokenizer = PreTrainedTokenizerFast.from_pretrained(made / "apples-model")
    turns = list(stored_turns(run.folder, end=tokenizer.eos_token_id))
    assert any("<tool_response>" in turn.context_text for turn in turns), "tools were called and answered"
    for turn in turns:
        assert tokenizer.decode(turn.tokens, skip_special_tokens=True) == turn.text


RIGHT = "def add(a, b): return a + b"
"""What the simulated engine answers where it is right: the prompt itself."""


@pytest.mark.timeout(400)
def test_the_coding_agent_earns_the_share_of_tests_that_pass(tmp_path: Path) -> None:
    tests = ["add(1, 2) == 3", "add(1, 1) == 3"]
    items = [{"prompt": f"{RIGHT}  # {number}", "answer": "", "tests": tests} for number in range(100)]
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    job = simulated_job(dataset="items.jsonl", steps=3)
    agent = {"command": ["python", str(EXAMPLES / "coding.py")], "maxTurns": 3, "sessionsPerProgram": 8}
    job["spec"]["task"] |= {"agent": agent, "rewards": [{"name": "tests", "environment": {}}]}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 0, run.logs()
    run.assert_exact()
    assert all(line["reward_failed"] == 0 for line in read_jsonl(run.folder / "metrics" / "steps.jsonl"))
    with open_samples(run.folder) as store:
        rewards = {sample.reward for group in store.groups() for sample in group.read().samples}
    assert rewards == {0.0, 0.5}, "one of two tests passes where the function is right"


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        (RIGHT, []),
        ("def add(a, b): return a - b", ["add(1, 2) == 3: is false"]),
        ("", ["add(1, 2) == 3: NameError: name 'add' is not defined"]),
        ("def add(a, b): raise SystemExit(0)", ["add(1, 2) == 3: SystemExit: 0"]),
        ("def add(a", ["add(1, 2) == 3: SyntaxError: '(' was never closed"]),
        ("raise SystemExit(0)", ["add(1, 2) == 3: ended with status 0"]),
        (
            "def eval(*_): return True\njson = why = failed = None",
            ["add(1, 2) == 3: NameError: name 'add' is not defined"],
        ),
        (f"{RIGHT}\nimport atexit\natexit.register(print, '[]]')\nprint('[]' * 10_000_000)", []),
        ("import sys\nsys.stderr.write('x' * 10_000_000)", ["add(1, 2) == 3: xxx"]),
        (f"{RIGHT}\nif __name__ == '__main__': raise ValueError", []),
        (
            f"from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A: b: int\n{RIGHT}",
            [],
        ),
        ("# \ud800", ["add(1, 2) == 3: UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800'"]),
        ("while True: print('x' * 1000)", ["add(1, 2) == 3: "]),
    ],
)
def test_the_coding_agents_tests_run_out_of_reach_of_the_code(code: str, failed: list[str]) -> None:
    found = run_path(str(EXAMPLES / "coding.py"))["run_tests"](code, ["add(1, 2) == 3"])
    assert len(found) == len(failed)
    assert all(line.startswith(begin) for line, begin in zip(found, failed, strict=True)), found
