"""Generated files are what their generators write now."""

import os
import subprocess
import sys

from support.tree import ROOT


def test_generated_files_are_fresh() -> None:
    done = subprocess.run(
        [ROOT / "tools/check_generated.sh"],
        env=os.environ | {"PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
