"""A loop of the harness that looks at the cluster whenever it changed: the provisioner and the enforcer are two of them.

Consumes: changes of the watched paths. Produces: what `step` does. Waits for: a change or the resync. Unblocked by: close().
"""

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.harness.objects import Objects, Watcher

RESYNC_S = 5.0
END_S = 10.0
RETRY_S = 0.5


class Loop:
    """Calls `step` in a thread; an error is kept, said once, and the step is tried again."""

    def __init__(self, name: str, kubeconfig: Path, paths: Sequence[str], step: Callable[[Objects], None]) -> None:
        self.name = name
        self.last_error: str | None = None
        self.rounds = 0
        """Steps that were done; a test waits for one more to know that what it applied has been seen."""
        self._api = Objects(kubeconfig)
        self._watcher = Watcher(kubeconfig, paths)
        self._step = step
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            self._watcher.changed.wait(RESYNC_S)
            self._watcher.changed.clear()
            if not self._over.is_set():
                self._once()

    def _once(self) -> None:
        try:
            self._step(self._api)
        except Exception as error:  # noqa: BLE001 - whatever it was, the cluster goes on and the next round may do
            text = f"{type(error).__name__}: {error}"
            if text != self.last_error and not self._over.is_set():
                sys.stderr.write(f"{self.name}: {text}\n")
            self.last_error = text
            self._over.wait(RETRY_S)
            self._watcher.changed.set()
            return
        self.last_error = None
        self.rounds += 1

    def close(self) -> None:
        self._over.set()
        self._watcher.close()
        self._thread.join(END_S)
        self._api.close()
