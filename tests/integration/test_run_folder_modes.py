"""What a run leaves is its owner's alone; what the user's own functions and shared caches leave is as the user has it."""

import json
import subprocess
import sys
from pathlib import Path

from support.jobs import simulated_job, write_prompts

DEADLINE_S = 240.0
REWARD = """
import pathlib

def seen(*, prompt, completion, answer, metadata):
    pathlib.Path("@/theirs").write_text("x")
    return 1.0
"""


def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "theirs.py").write_text(REWARD.replace("@", str(tmp_path)))
    job = simulated_job(steps=6)
    job["spec"]["task"]["rewards"] = [{"name": "seen", "python": {"function": "theirs:seen"}}]
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    folder = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "streamrl_cli.main", "run", "job.yaml", "--run-dir", str(folder)],
        cwd=tmp_path,
        umask=0o022,
        capture_output=True,
        check=False,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = [folder, *folder.rglob("*")]
    assert {"journal.sqlite", "report.html", "job.json", "scheduler.log"} <= {path.name for path in made}
    open_to_others = [path for path in made if path.stat().st_mode & 0o077]
    assert [str(path.relative_to(tmp_path)) for path in open_to_others] == []
    assert oct((tmp_path / "theirs").stat().st_mode & 0o777) == "0o644"


def test_the_process_that_runs_it_keeps_its_own(tmp_path: Path) -> None:
    """The command is called inside of other programs too."""
    (tmp_path / "job.yaml").write_text(json.dumps(simulated_job()))
    write_prompts(tmp_path / "prompts.jsonl")
    call = f"main(['run', {str(tmp_path / 'job.yaml')!r}, '--run-dir', {str(tmp_path)!r}])"
    program = f"import os; from streamrl_cli.main import main; os.umask(0o027); {call}; print(oct(os.umask(0)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True, timeout=DEADLINE_S
    )
    assert "must be a new or empty folder" in done.stderr
    assert done.stdout.splitlines() == ["0o27"]
