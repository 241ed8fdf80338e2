"""Workers whose run folder's disk is full when they begin: a limit on file sizes stands for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import keys
from support.jobs import simulated_job, write_prompts
from support.runs import DEADLINE_S

LEAST_BYTES = 16
"""A file may become so large: every small file that a worker writes is larger."""


@pytest.mark.parametrize(
    ("process", "module", "own"),
    [
        ("generator-sim-0", "streamrl_workers.generator", {keys.ENV_POOL: "sim"}),
        ("trainer-0", "streamrl_workers.trainer", {}),
    ],
)
def test_an_address_that_cannot_be_written_is_one_line(
    process: str, module: str, own: dict[str, str], tmp_path: Path
) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "endpoints").mkdir()
    (tmp_path / keys.FILE_JOB).write_text(json.dumps(simulated_job()))
    env = {
        **os.environ,
        keys.ENV_RUN_DIR: str(tmp_path),
        keys.ENV_PROCESS: process,
        keys.ENV_SCHEDULER_ADDRESS: "127.0.0.1:9",
        keys.ENV_TOKEN: "t",
        "PYTHONDONTWRITEBYTECODE": "1",  # cut byte code would stay, for every process after this one
        **own,
    }
    ended = subprocess.run(
        ["prlimit", f"--fsize={LEAST_BYTES}", sys.executable, "-m", module],
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    said = [line for line in ended.stderr.splitlines() if not line.startswith("20")]  # logs begin with the year
    assert (ended.returncode, len(said)) == (2, 1), ended.stderr
    assert said[0].startswith(tuple(f"{tmp_path / folder / process}.json" for folder in ("endpoints", "metrics")))
    assert ": cannot be written: " in said[0]
    assert list((tmp_path / "endpoints").iterdir()) == []
