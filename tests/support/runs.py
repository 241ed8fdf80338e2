"""Drives a real `streamrl run` in a process of its own: start, watch, kill, resume, check."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl_workers.metrics.jsonl import read_jsonl

DEADLINE_S = 240.0
"""A busy machine may be slow; a hang must still be a failure that says what it waited for."""
COMMAND_S = 300.0
"""Of a whole command, which may import torch: a quarter of a minute of processor time, on a machine that builds something else."""
POLL_S = 0.02


def wait_for(condition: Callable[[], Any], *, what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until `condition` gives something true; returns it."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(POLL_S)  # a poll with a deadline, not a guess
    return value


STARTED: list[subprocess.Popen[str]] = []
"""Every `streamrl run` of the current test; what it leaves is ended after it (tests/conftest.py)."""


@dataclass(slots=True)
class LocalRun:
    """A run folder and the `streamrl run` process that works on it."""

    folder: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(
        cls,
        job: dict[str, Any],
        *,
        folder: Path,
        base_dir: Path,
        args: Sequence[str] = (),
        file_size_limit_bytes: int | None = None,
    ) -> "LocalRun":
        """Write the job as a file (YAML reads JSON) and run it; a limit on file sizes stands for a full disk."""
        file = base_dir / "job.yaml"
        file.write_text(json.dumps(job))
        return cls(
            folder,
            _spawn(
                [str(file), "--run-dir", str(folder), *args],
                log=base_dir / "run.out",
                limit_bytes=file_size_limit_bytes,
            ),
        )

    def resume(self, *args: str) -> None:
        """Go on with the folder in a new process; returns when it is at work (and takes a Ctrl-C as such)."""
        out = self.folder.parent / "run.out"
        greetings = out.read_text().count("run folder:")
        self.process = _spawn(["--resume", str(self.folder), *args], log=out)
        wait_for(
            lambda: out.read_text().count("run folder:") > greetings or self.process.poll() is not None,
            what=f"the resumed run; {self.logs()}",
        )

    def steps(self) -> int:
        """Steps recorded so far."""
        lines = self._lines("steps.jsonl")
        return max((int(line["step"]) + 1 for line in lines), default=0)

    def wait_steps(self, steps: int) -> None:
        """Until so many steps are recorded, or the run ends."""
        wait_for(
            lambda: self.steps() >= steps or self.process.poll() is not None,
            what=f"step {steps} of {self.folder}; {self.logs()}",
        )

    def pid_of(self, name: str) -> int | None:
        """Process id of a worker, if it is alive."""
        try:
            pid = int(json.loads((self.folder / "endpoints" / f"{name}.json").read_text())["pid"])
            os.kill(pid, 0)
        except (OSError, ValueError, KeyError):
            return None
        return pid

    def kill(self, name: str) -> bool:
        """`kill -9` of a worker; False if it is not alive just now."""
        pid = self.pid_of(name)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    def kill_one(self, name: str) -> None:
        """Kill a worker (once it is there) and wait until a new one has taken its place."""
        old = int(wait_for(lambda: self.pid_of(name), what=f"{name} to be alive; {self.logs()}"))
        os.kill(old, signal.SIGKILL)
        self.wait_replaced(name, pid=old)

    def said(self) -> str:
        """What the runner has written to the terminal."""
        return (self.folder.parent / "run.out").read_text()

    def freeze(self, name: str) -> int:
        """SIGSTOP a worker (once it is there); its process id."""
        pid = int(wait_for(lambda: self.pid_of(name), what=f"{name} to be alive; {self.logs()}"))
        os.kill(pid, signal.SIGSTOP)
        return pid

    def wait_said(self, text: str, *, times: int = 1, deadline_s: float = DEADLINE_S) -> None:
        """Until the runner has said so in the terminal so many times."""
        wait_for(
            lambda: self.said().count(text) >= times or self.process.poll() is not None,
            what=f"the line {text!r}; {self.logs()}",
            deadline_s=deadline_s,
        )
        assert self.said().count(text) >= times, f"the run ended without the line {text!r}; {self.logs()}"

    def wait_replaced(self, name: str, *, pid: int, deadline_s: float = DEADLINE_S) -> None:
        """Until a new process has taken the place of a worker."""
        wait_for(
            lambda: self.pid_of(name) not in (None, pid) or self.process.poll() is not None,
            what=f"a new {name}; {self.logs()}",
            deadline_s=deadline_s,
        )

    def kill_all(self, names: Sequence[str]) -> None:
        """`kill -9` of the runner and every worker."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for name in names:
            self.kill(name)
        wait_for(lambda: not any(self.pid_of(name) for name in names), what="all workers to be gone")

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(DEADLINE_S)

    def wait_end(self) -> int:
        """Exit code of the run."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {DEADLINE_S:.0f} s; {self.logs()}") from None

    def check(self) -> subprocess.CompletedProcess[str]:
        """`streamrl journal check` of the folder."""
        return streamrl("journal", "check", str(self.folder))

    def assert_exact(self) -> str:
        """The journal is exact; returns what `journal check` says."""
        check = self.check()
        assert check.returncode == 0, f"{check.stdout}{check.stderr}\n{self.logs()}"
        return check.stdout

    def walls(self) -> list[dict[str, Any]]:
        """The bubble lines of every generator and trainer, all instances."""
        return [line for file in (self.folder / "metrics").glob("*-[0-9].jsonl") for line in read_jsonl(file)]

    def result(self) -> dict[str, Any]:
        """How the run ended."""
        return dict(json.loads((self.folder / "result.json").read_text()))

    def logs(self) -> str:
        """Ends of all logs, for a failure's message."""
        out = self.folder.parent / "run.out"
        files = [*sorted((self.folder / "logs").glob("*.log")), *([out] if out.exists() else [])]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "metrics" / name))


def streamrl(*args: str, cwd: Path | None = None, deadline_s: float = COMMAND_S) -> subprocess.CompletedProcess[str]:
    """Run the command line once."""
    return subprocess.run(
        [sys.executable, "-m", "streamrl_cli.main", *args],
        capture_output=True,
        text=True,
        timeout=deadline_s,
        cwd=cwd,
        check=False,
    )


def _spawn(args: Sequence[str], *, log: Path, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "streamrl_cli.main", "run", "--plain", *args]
    if limit_bytes is not None:
        command = ["prlimit", f"--fsize={limit_bytes}", *command]
    with log.open("a") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, text=True)
    STARTED.append(process)
    return process
