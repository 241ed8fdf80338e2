"""Ends what a harness started, when the harness is gone, however it went.

A harness marks all its processes by one environment variable (inherited by their children) and starts one reaper. The reaper
waits for the end of its standard input, which the harness alone holds open, or for another parent; then it kills all that
carries the mark and removes the folder. So nothing is left after a SIGKILL of pytest either.

    python reaper.py MARK FOLDER [UNDO ...]      UNDO: a shell command line, run after the kills (unmounts, links, rules)

Runs as a plain file: imports nothing but the standard library.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK_VARIABLE = "STREAMRL_TEST_CLUSTER"
_LOOK_S = 1.0
_KILL_ROUNDS = 50


def start(mark: str, folder: Path, *, undo: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a reaper for the processes that carry `mark`; end it, and them, by `finish`."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, mark, str(folder), *undo],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C ends the harness; the reaper ends the rest
    )


def finish(reaper: subprocess.Popen[bytes], *, deadline_s: float = 60.0) -> None:
    """Have the reaper do its work now."""
    assert reaper.stdin is not None
    reaper.stdin.close()
    try:
        reaper.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"waited {deadline_s} s for the end of a test cluster's processes") from None


def environment(mark: str) -> dict[str, str]:
    """Return the environment of a process that the reaper is to end."""
    return os.environ | {MARK_VARIABLE: mark}


def marked(mark: str) -> list[int]:
    """Return the processes that carry `mark`, but this one."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            if wanted in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def _wait(parent: int) -> None:
    while os.getppid() == parent:
        readable, _, _ = select.select([0], [], [], _LOOK_S)
        if readable and not os.read(0, 4096):
            return


def _kill_all(mark: str) -> None:
    """Kill until none is left: one may have been between fork and exec."""
    for _ in range(_KILL_ROUNDS):
        alive = marked(mark)
        if not alive:
            return
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main(mark: str, folder: str, undo: list[str]) -> None:
    """Wait for the harness's end, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait(os.getppid())
    _kill_all(mark)
    for line in undo:
        subprocess.run(["/bin/sh", "-c", line], check=False, timeout=60, stdin=subprocess.DEVNULL)
    _kill_all(mark)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
