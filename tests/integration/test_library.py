"""`import streamrl`: a job from Python, by the runner of `streamrl run`, in scripts of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import streamrl
from streamrl.errors import UserErrors
from support.jobs import LINES, simulated_job
from support.runs import streamrl as command

pytestmark = pytest.mark.timeout(400)
STEPS = 6


def job_file(directory: Path, **changes) -> Path:
    (directory / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "p{line}", "answer": "a"}}\n' for line in range(LINES))
    )
    path = directory / "job.json"
    path.write_text(json.dumps(simulated_job(steps=STEPS, **changes)))
    return path


def script(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import streamrl\n{text}"],
        check=False,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_run_from_a_file_tells_its_events_and_leaves_what_a_command_reads(tmp_path: Path) -> None:
    run = streamrl.load(job_file(tmp_path)).run(tmp_path / "run")
    events = list(run)
    assert [event.step for event in events if event.kind == "step"] == list(range(STEPS))
    assert any(event.kind == "evaluation" for event in events)
    assert (run.result["status"], run.is_running) == ("succeeded", False)
    assert [row["step"] for row in run.metrics] == list(range(STEPS))
    assert run.metrics.arrow().num_rows == len(run.metrics.pandas()) == STEPS
    samples = list(run.samples())
    assert len(samples) == STEPS * 4 * 4 and {"prompt", "completion", "reward", "advantage"} <= samples[0].keys()
    assert command("journal", "check", str(run.folder)).returncode == 0
    opened = streamrl.open_run(run.folder)
    assert (opened.metrics, [event.data for event in opened]) == (run.metrics, [event.data for event in events])
    assert f"{STEPS} of {STEPS} steps" in opened._repr_html_()


def test_an_interrupt_stops_the_run_with_a_checkpoint_and_resume_ends_it(tmp_path: Path) -> None:
    job_file(tmp_path)
    stopped = script(
        tmp_path,
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it\n"
        "run = streamrl.load('job.json', **{'spec.pipeline.steps': 100000}).run('run')\n"
        "for event in run:\n"
        "    if event.step == 2: signal.raise_signal(signal.SIGINT)\n",
    )
    assert "KeyboardInterrupt" in stopped.stderr
    job = json.loads((tmp_path / "run" / "job.json").read_text())
    steps = max(int(path.name.partition("-")[2]) for path in (tmp_path / "run" / "checkpoints").glob("step-*[0-9]"))
    job["spec"]["pipeline"]["steps"] = steps + 2
    (tmp_path / "run" / "job.json").write_text(json.dumps(job))
    run = streamrl.open_run(tmp_path / "run").resume()
    assert run.wait()["steps"] == steps + 2


def test_a_script_that_ends_stops_its_run(tmp_path: Path) -> None:
    job_file(tmp_path)
    ended = script(
        tmp_path, "run = streamrl.load('job.json', **{'spec.pipeline.steps': 100000}).run('run')\nnext(iter(run))"
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "--resume" in (tmp_path / "run" / "logs" / "streamrl-run.log").read_text().splitlines()[-1]


def test_mistakes_are_the_errors_of_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserErrors, match=r"spec.pipeline.steps: must be a whole number"):
        streamrl.load(job_file(tmp_path), **{"spec.pipeline.steps": 0})
    document = simulated_job(dataset="absent.jsonl")
    with pytest.raises(UserErrors, match=r"absent.jsonl"):
        streamrl.load(document, base_dir=tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = streamrl.nothing
