"""Namespaces of a node: its own processes, mounts, network and host name, all gone with their first process.

Owns the life of `node_init.py`. Nothing in it can outlive the harness: the first process dies by PR_SET_PDEATHSIG and by
the end of its standard input, and the kernel then kills the rest, unmounts, and removes bridges, links and rules.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.harness.processes import ClusterError, tail, wait_until

START_S = 120.0
COMMAND_S = 60.0
KILL_S = 120.0


class Sandbox:
    """A running set of namespaces, with named services in it."""

    def __init__(self, folder: Path, *, name: str) -> None:
        self.folder = folder
        self.log_folder = folder / "log"
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._log = self.log_folder / "init.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv(name), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
            )
        self.pid: int = self._read(deadline_s=START_S)["pid"]
        """First process of the namespaces, as the machine outside sees it."""

    def _argv(self, name: str) -> list[str]:
        unshare = shutil.which("unshare")
        if unshare is None:
            raise ClusterError("unshare is missing: apt-get install util-linux")
        own = [
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--ipc",
            "--fork",
            "--kill-child=SIGKILL",
            "--propagation",
            "private",
        ]
        script = Path(__file__).with_name("node_init.py")
        return [unshare, *own, sys.executable, "-I", str(script), str(self.folder), name]

    def _read(self, *, deadline_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], deadline_s)
        line = self._process.stdout.readline() if readable else b""
        if not line:
            raise ClusterError(
                f"waited {deadline_s:.0f} s for an answer of the node's first process\n{tail(self._log)}"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ClusterError(f"the node's first process: {reply['error']}")
        return reply

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            return self._read(deadline_s=START_S)

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> None:
        """Start a service; its output goes to `log_of(name)`."""
        found = shutil.which(argv[0])
        if found is None:
            raise ClusterError(f"{argv[0]} is missing: {name} needs it")
        argv = [found, *argv[1:]]
        self._ask({"do": "start", "name": name, "argv": argv, "log": str(self.log_of(name)), "env": dict(env or {})})

    def log_of(self, name: str) -> Path:
        return self.log_folder / f"{name}.log"

    def ended(self) -> dict[str, int]:
        """Exit codes of the services that are not running."""
        codes: dict[str, int] = self._ask({"do": "ended"})["codes"]
        return codes

    def stop(self, name: str, *, signal_number: int = signal.SIGTERM, deadline_s: float = KILL_S) -> None:
        """End one service and wait until it has ended."""
        self._ask({"do": "send", "name": name, "signal": int(signal_number)})
        wait_until(lambda: name in self.ended(), what=f"{name} to end", deadline_s=deadline_s, log=self.log_of(name))

    def wait_ready(self, name: str, check: Callable[[], bool], *, what: str, deadline_s: float) -> None:
        """Wait until a service is ready; says so at once when it ended instead."""

        def ready() -> bool:
            if (code := self.ended().get(name)) is not None:
                raise ClusterError(f"{name} ended with {code} before {what}\n{tail(self.log_of(name))}")
            return check()

        wait_until(ready, what=what, deadline_s=deadline_s, log=self.log_of(name))

    def run(
        self, *argv: str, stdin: str | None = None, deadline_s: float = COMMAND_S, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside; its error output stands in the exception."""
        outer = ["nsenter", "--target", str(self.pid), "--mount", "--net", "--pid", "--uts", "--ipc", *argv]
        done = subprocess.run(outer, input=stdin, capture_output=True, text=True, timeout=deadline_s, check=False)
        if check and done.returncode:
            raise ClusterError(
                f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done

    @property
    def enter_network(self) -> tuple[str, ...]:
        """Command that starts a program of this machine in the network namespace alone."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Have the first process end: the kernel ends the rest before it lets go of that one."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(KILL_S)
        except subprocess.TimeoutExpired as error:
            os.kill(self.pid, signal.SIGKILL)
            raise ClusterError(f"waited {KILL_S:.0f} s for the node's processes to be gone") from error
