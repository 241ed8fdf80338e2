"""Early SIGTERM handling: the first thing that every worker does. Imports nothing that takes time.

A container's first process is deaf to signals that it has no handler for: a pod that is deleted while torch is imported would stay for
its whole grace period. What comes later sets handlers of its own. A process that becomes another (`execv`) loses its
handlers: a signal waits until the other has set its own.
"""

import os
import signal


def exit_on_sigterm(*, exit_code: int) -> None:
    """From now on SIGTERM ends this process at once: there is nothing yet to be kept."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(exit_code))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def exec_worker(argv: list[str]) -> None:
    """Become another worker, without being deaf in between. Does not return."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # one that is blocked is kept, also for a first process
    os.execv(argv[0], argv)  # noqa: S606 - a worker of ours
