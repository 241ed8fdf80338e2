"""Finds every process of a tree that has a heartbeat, and freezes it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

from streamrl.keys import ENV_HEARTBEAT_FILE


def hearts(root: psutil.Process) -> dict[str, psutil.Process]:
    """Name of the heartbeat file -> the process that touches it, of all that `root` has started. Forks have their parent's environment."""
    found: dict[str, psutil.Process] = {}
    for process in root.children(recursive=True):  # parents first
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if file := process.environ().get(ENV_HEARTBEAT_FILE):
                found.setdefault(Path(file).name, process)
    return found


@contextlib.contextmanager
def frozen(*processes: psutil.Process) -> Iterator[None]:
    """SIGSTOP; SIGCONT at the end."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
