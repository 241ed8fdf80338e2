"""Every part of the benchmark of one GPU, on the processor."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 580


PARTS = ("machine", "copies", "rates", "rows", "experts", "generator", "trainer", "modes")


@pytest.mark.parametrize("parts", [PARTS, pytest.param(("replay",), marks=pytest.mark.soak)], ids=["most", "replay"])
def test_without_a_gpu_every_part_runs_on_a_tiny_shape(parts: Sequence[str]) -> None:
    chosen = [argument for part in parts for argument in ("--only", part)]
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--shape", "tiny", "--minutes", "60", *chosen]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU" in done.stdout
    for part in parts:
        assert f"| {part} | tiny | done |" in done.stdout, done.stdout + done.stderr
