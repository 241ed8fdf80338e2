"""The table of models is measured whole, and no cell is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT


@pytest.mark.soak
@pytest.mark.timeout(7200)  # some thirty families, each in processes of its own
def test_no_cell_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "tools/models.py", "--output", str(tmp_path / "models.json")]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": "tests"}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
