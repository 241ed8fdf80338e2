"""Processes that others have left behind: who adopts them, and their end. By Linux's subreapers; elsewhere only process groups are killed."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"
_FIELDS_BEHIND_NAME = 2
"""Of `/proc/PID/stat` behind the command's closing bracket: the state, the parent."""


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, not of the machine's first."""
    if _LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_orphans(of_pid: int, *, but: Collection[int]) -> None:
    """Kill what a worker that has been waited for has left behind; `but`: our other children."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(of_pid, signal.SIGKILL)
    kill_children(but=but)


def kill_children(*, but: Collection[int] = ()) -> None:
    """Kill and wait for children until there is none."""
    while doomed := children() - set(but):
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in doomed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)  # its own children are ours now


def children() -> set[int]:
    """Processes whose parent is this one; none where there is no `/proc`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat") if _LINUX else ():
        with contextlib.suppress(OSError, ValueError):
            fields = entry.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if int(fields[_FIELDS_BEHIND_NAME - 1]) == os.getpid():
                found.add(int(entry.parent.name))
    return found


def die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, also in a hang that holds the interpreter lock."""
    if not _LINUX:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)
