"""The operator as a process of its own, started in a tenth of a second: forked from a server that has imported it already.

Owns: start, SIGKILL, and that no operator outlives the campaign. It is the operator's own `main`, in its own process with its own
environment; only the import of its modules is shared. Ends like a pod's container: whoever wants it again starts it again.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["__main__", "streamrl_operator.main"])
_PR_SET_PDEATHSIG = 1


def _main(environ: Mapping[str, str], log: str) -> None:
    """Become an operator."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the fork server ends with the campaign
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environ)
    from streamrl_operator.main import main

    sys.exit(main())


class OperatorProcess:
    """One operator that may be started again and again."""

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.codes: list[int] = []
        """Exit codes of those that have ended by themselves."""
        self._environ = {"PATH": os.environ["PATH"], **environ}
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        """Begin; what ran before must have ended."""
        assert not self.runs, "one at a time"
        self._process = _FORKS.Process(target=_main, args=(self._environ, str(self.log)), daemon=True)
        self._process.start()

    @property
    def runs(self) -> bool:
        """Whether it lives."""
        return self._process is not None and self._process.is_alive()

    def kill(self) -> None:
        """SIGKILL, without a wait."""
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)

    def again(self) -> None:
        """As a kubelet: start it again if it has ended by itself."""
        if self._process is not None and not self._process.is_alive():
            self.codes.append(self._process.exitcode or 0)
            self.start()

    def lines(self) -> list[str]:
        """Of its log."""
        return self.log.read_text(errors="replace").splitlines() if self.log.exists() else []

    def traces(self) -> list[str]:
        """Lines of its log that show an error of ours."""
        return [line for line in self.lines() if '"trace"' in line or line.startswith("Traceback")]
