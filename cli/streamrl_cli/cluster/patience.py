"""How long an API server that does not answer is asked again by the commands that go on for hours."""

from collections.abc import Callable
from time import monotonic

from streamrl_cli.cluster.api import UnreachableError

LIMIT_S = 120.0
"""An API server is restarted, or a laptop changes its network, in less."""


class Patience:
    """Time since the last answer."""

    def __init__(self, limit_s: float = LIMIT_S, *, clock: Callable[[], float] = monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._answered_s = clock()

    def answered(self) -> None:
        """There was an answer."""
        self._answered_s = self._clock()

    def bear(self, error: UnreachableError) -> None:
        """There was none; raises `error` if it has been so for too long."""
        if self._clock() - self._answered_s > self._limit_s:
            raise error
