"""`streamrl profile` with its real processes: simulated engines whose curve is known, and a tiny model on torch."""

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.profile_command import lines
from streamrl_cli.profiling.record import Profile, read_profile
from support.jobs import simulated_job, write_prompts
from support.tiny_folder import tiny_folder
from support.tree import ROOT, python

COMMAND = """
import sys
from streamrl_cli import profile_command
from streamrl_cli.console import err
from streamrl.errors import UserError, UserErrors
import argparse
parser = argparse.ArgumentParser()
profile_command.add_arguments(parser)
try:
    code = profile_command.run(parser.parse_args(sys.argv[1:]))
except (UserError, UserErrors) as error:
    code = 2
    err(*error.lines)
print("exit code", code)
"""
LATENCY = [{"batch": 1, "milliseconds": 4.0}, {"batch": 8, "milliseconds": 11.0}]
NOISE = 2.0
"""Real time on a machine that may be busy: what falls between two steps is not counted, and the engine gives its tokens all the same. The exact
figures are shown in virtual time (tests/unit/cli/test_profile_timing.py)."""


DEADLINE_S = 300.0
"""Six processes load torch for the tiny model, one after the other, on a machine that may be busy."""


def profile(*arguments: str) -> str:
    """Run the command in a process of its own; what it wrote to standard output."""
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("exit code 0\n"), done.stderr
    return done.stdout


def write_job(folder: Path, **trainer: Any) -> Path:
    write_prompts(folder / "prompts.jsonl")
    job = simulated_job(batch_groups=16, latency=LATENCY, slots=8, meanTokens=40.0)
    job["spec"]["trainer"]["engine"]["simulated"] = trainer
    path = folder / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def assert_near(measured: float, *, stated: float) -> None:
    assert stated / NOISE <= measured <= stated * NOISE


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Job, profile and what was printed; the simulated job is measured once."""
    folder = tmp_path_factory.mktemp("profile")
    job = write_job(folder, secondsPerStep=0.02, secondsPerToken=0.0001)
    out = folder / "profile.json"
    text = profile(str(job), "--out", str(out), "--batches", "1,4,8", "--windows", "3")
    return job, out, text


def test_a_simulated_pool_has_the_curve_that_the_job_states(measured: tuple[Path, Path, str]) -> None:
    pool = read_profile(measured[1]).pools[0]
    assert [point.batch for point in pool.latency] == [1, 4, 8]
    for point, stated in zip(pool.latency, (4.0, 7.0, 11.0), strict=True):
        assert_near(point.milliseconds, stated=stated)
        assert point.lowest_milliseconds <= point.milliseconds <= point.highest_milliseconds
        assert point.steps >= 3 * 16


def test_its_answers_are_those_that_it_would_give(measured: tuple[Path, Path, str]) -> None:
    lengths = read_profile(measured[1]).pools[0].lengths
    assert (len(lengths.tokens), lengths.unfinished, lengths.turns) == (64, 0, 1)
    assert 30 <= sorted(lengths.tokens)[32] <= 55  # the median of 64 draws around 40
    assert max(lengths.tokens) <= 64


def test_a_simulated_trainer_takes_its_step_and_its_tokens(measured: tuple[Path, Path, str]) -> None:
    trainer = read_profile(measured[1]).trainer
    assert trainer is not None
    assert [point.samples for point in trainer.points] == [4, 16, 64]
    for point in trainer.points:
        assert point.seconds >= 0.02 + 0.0001 * point.tokens
    small, _, large = trainer.points
    slope = (large.seconds - small.seconds) / (large.tokens - small.tokens)
    assert_near(slope, stated=0.0001)


def test_it_says_what_it_measured(measured: tuple[Path, Path, str]) -> None:
    _, out, text = measured
    printed = text.splitlines()
    assert printed[:-3] == lines(read_profile(out))
    assert printed[0] == "POOL sim, engine simulated"
    assert printed[-2:] == [f"written: {out}", "exit code 0"]


def test_one_part_is_measured_again_and_the_other_kept(measured: tuple[Path, Path, str], tmp_path: Path) -> None:
    job, known, _ = measured
    out = Path(shutil.copy(known, tmp_path))
    before = read_profile(out)
    profile(str(job), "--out", str(out), "--trainer", "--set", "spec.trainer.engine.simulated.secondsPerStep=0.1")
    after = read_profile(out)
    assert after.pools == before.pools
    assert before.trainer is not None
    assert after.trainer is not None
    assert all(new.seconds >= 0.1 for new in after.trainer.points)
    assert [new.tokens for new in after.trainer.points] == [old.tokens for old in before.trainer.points]


def test_a_point_that_takes_too_long_is_one_line(tmp_path: Path) -> None:
    job = write_job(tmp_path, secondsPerStep=0.0, secondsPerToken=0.01)
    out = tmp_path / "profile.json"
    code = f"import sys; sys.stderr = sys.stdout\n{COMMAND}"
    said = python(code, str(job), "--out", str(out), "--trainer", "--deadline-seconds", "0.5").splitlines()
    assert said == [
        "streamrl: --deadline-seconds: was too short: a step of 1 groups takes more than 0.5 s; raise it, or measure less at once",
        "exit code 2",
    ]
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--batches", "1,9"), "--batches: must be from 1 to the 8 slots of pool sim, got 9"),
        (("--pool", "gpu"), "--pool: must be one of sim, got 'gpu'"),
        (("--processes", "2"), "--processes: must be 1 with trainer engine simulated, got 2"),
        (("--windows", "0"), "--windows: must be at least 1, got 0"),
        (("--deadline-seconds", "0"), "--deadline-seconds: must be above 0, got 0.0"),
        (
            ("--set", "spec.generators[0].engine.simulated.timeScale=0"),
            "spec.generators[0].engine.simulated.timeScale: must be above 0: such an engine takes no time, got 0",
        ),
        (("--out", "/nowhere/at/all.json"), "--out: must lie in a directory that exists, got '/nowhere/at/all.json'"),
        (("--out", "/dev/full"), "--out: must be a regular file or a new one, got '/dev/full'; name another"),
    ],
)
def test_each_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    code = f"import sys; sys.stderr = sys.stdout\n{COMMAND}"
    said = python(code, str(write_job(tmp_path)), *arguments).splitlines()
    assert said == [line, "exit code 2"]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_tiny_model_is_measured_with_its_real_engines(tmp_path: Path) -> None:
    prompts = (f'{{"prompt": "w{a} w{b} w{a}", "answer": "w2"}}\n' for a, b in itertools.product(range(8), range(8)))
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    job = simulated_job(batch_groups=4)
    job["spec"]["model"] = {"path": {"directory": str(tiny_folder(tmp_path / "model"))}}
    job["spec"]["task"]["sampling"] = {"maxTokens": 24}
    job["spec"]["generators"][0]["engine"] = {"hf": {"slots": 4}}
    job["spec"]["trainer"] = {"microBatchTokens": 256}
    path, out = tmp_path / "job.yaml", tmp_path / "profile.json"
    path.write_text(json.dumps(job))
    profile(str(path), "--out", str(out), "--windows", "2", "--repeats", "2", "--samples", "8", "--processes", "1,2")
    found: Profile = read_profile(out)
    pool = found.pools[0]
    assert [point.batch for point in pool.latency] == [1, 2, 4]
    assert len(pool.lengths.tokens) == 8
    assert max(pool.lengths.tokens) <= 24
    assert found.trainer is not None
    assert [(point.processes, point.samples) for point in found.trainer.points] == [
        (processes, samples) for processes in (1, 2) for samples in (4, 16)
    ]
    assert found.model == {"path": {"directory": str(tmp_path / "model")}}


def test_the_command_starts_light() -> None:
    code = (
        "import sys, streamrl_cli.profile_command; print({'torch', 'numpy', 'grpc', 'transformers'} & set(sys.modules))"
    )
    assert python(code).strip() == "set()"
    assert (ROOT / "cli/streamrl_cli/profile_command.py").is_file()
