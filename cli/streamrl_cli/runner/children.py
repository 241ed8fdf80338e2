"""What children of this process need: a line to it, and a port of their own."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from streamrl_cli.runner.plan import LOOPBACK


@contextmanager
def open_lifeline() -> Iterator[int]:
    """The end of a pipe at which a child sees that this process is gone."""
    ends = os.pipe()
    try:
        yield ends[0]
    finally:
        for end in ends:
            os.close(end)


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])
