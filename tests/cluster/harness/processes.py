"""One server process of a test cluster: started with a log of its own, waited for, ended."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.harness import reaper

TAIL_LINES = 20
_LOOK_S = 0.05


class ClusterError(Exception):
    """The cluster did not do what was asked; the text says what was awaited and shows the end of the log."""


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the end of a log."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else ["(no log)"]
    return "\n".join(text[-lines:])


def wait_until(check: Callable[[], bool], *, what: str, deadline_s: float, log: Path | None = None) -> None:
    """Wait for a condition with a deadline that says what it waited for."""
    end = time.monotonic() + deadline_s
    while not check():
        if time.monotonic() > end:
            shown = f"; end of {log}:\n{tail(log)}" if log else ""
            raise ClusterError(f"waited {deadline_s:g} s for {what}{shown}")
        time.sleep(_LOOK_S)


class Server:
    """A server process: can be started again with the same command after `stop`."""

    def __init__(self, name: str, command: Sequence[str | Path], *, log: Path, mark: str) -> None:
        self.name = name
        self.log = log
        self._command = [str(part) for part in command]
        self._mark = mark
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process, None when it does not run."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it; `wait` says when it serves."""
        assert self.pid is None, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=reaper.environment(self._mark),
                process_group=0,  # Ctrl-C is for the harness, which ends its servers in order
            )

    def wait(self, ready: Callable[[], bool], *, deadline_s: float) -> None:
        """Wait until `ready`; an end of the process is told at once."""

        def look() -> bool:
            assert self._process is not None
            if (code := self._process.poll()) is not None:
                raise ClusterError(f"{self.name} ended with {code}; end of {self.log}:\n{tail(self.log)}")
            return ready()

        wait_until(look, what=f"{self.name} to be ready", deadline_s=deadline_s, log=self.log)

    def stop(self, *, kill: bool = False, grace_s: float = 20.0) -> None:
        """End it by SIGTERM, after `grace_s` by SIGKILL; with `kill` at once."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(grace_s)

    def pause(self) -> None:
        """Stop it in its tracks: connections stay open and nobody answers."""
        assert self.pid is not None, f"{self.name} does not run"
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        assert self.pid is not None, f"{self.name} does not run"
        os.kill(self.pid, signal.SIGCONT)
