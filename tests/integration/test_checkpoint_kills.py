"""A trainer killed before each second change to its folder of checkpoints: some 25 kills, part of `make soak`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

TESTS = Path(__file__).parents[1]
EVERY = 2
MOST_S = 1000.0


def test_killed_at_each_write_a_trainer_repeats_its_steps_exactly(tmp_path: Path) -> None:
    """What the scheduler has heard of is there, and the weights are those of a run without kills, bit for bit."""
    command = [sys.executable, "-m", "support.checkpoint_kills", str(tmp_path), str(EVERY)]
    env = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=MOST_S, check=False)
    assert ended.returncode == 0, ended.stderr
    kills = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert len(kills) >= 20
    assert [kill for kill in kills if kill["status"] != [9, 0] or not kill["same"]] == [], ended.stderr
