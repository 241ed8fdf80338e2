"""A worker hears SIGTERM from its first line: as a container's first process it would be deaf while it imports torch."""

import os
import signal
import subprocess
import sys

import pytest

from streamrl import keys
from streamrl.errors import EXIT_DONE, EXIT_RETRY
from support.runs import DEADLINE_S


@pytest.mark.parametrize(
    ("module", "code"),
    [("generator", EXIT_DONE), ("trainer.launch", EXIT_DONE), ("trainer", EXIT_DONE), ("scheduler", EXIT_RETRY)],
)
def test_a_worker_that_has_not_begun_ends_when_it_is_told_to(module: str, code: int) -> None:
    """The signal is there before Python is: it is blocked, as it is kept for a first process that becomes another."""
    blocked = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM}
    )  # a child inherits it; between fork and exec gRPC's threads are in the way
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", f"streamrl_workers.{module}"],
            env={name: value for name, value in os.environ.items() if name != keys.ENV_RUN_DIR},
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (code, "")
