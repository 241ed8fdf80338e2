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
    process = subprocess.Popen(
        [sys.executable, "-m", f"streamrl_workers.{module}"],
        env={name: value for name, value in os.environ.items() if name != keys.ENV_RUN_DIR},
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),  # noqa: PLW1509 - no threads here
        stderr=subprocess.PIPE,
        text=True,
    )
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, said) == (code, "")
