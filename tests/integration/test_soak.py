"""The soak of `benchmarks/soak.py`, shorter: memory, journal and bubbles of a run at full speed, with kills."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
STEPS = int(os.environ.get("SOAK_STEPS", "800"))
"""Of 256 samples. Long enough for ten tenths of several seconds each."""
DEADLINE_S = 1_500.0


@pytest.mark.soak
@pytest.mark.timeout(DEADLINE_S)
def test_nothing_grows_and_the_numbers_stay_exact(tmp_path: Path) -> None:
    command = [sys.executable, str(SOAK), "--steps", str(STEPS), "--kills", "3", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every group is accounted for exactly once" in done.stdout
