"""Every part of the benchmark of one GPU, on the processor."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 580


def test_without_a_gpu_every_part_runs_on_a_tiny_shape() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--shape", "tiny", "--minutes", "60"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU" in done.stdout
    for part in ("machine", "copies", "rates", "rows", "experts", "generator", "trainer", "modes", "replay"):
        assert f"| {part} | tiny | done |" in done.stdout, done.stdout + done.stderr
