"""How a trainer process ends, as values and as the errors that unwind the step loop."""

from dataclasses import dataclass
from typing import Literal, NoReturn


class StoppedError(Exception):
    """The scheduler has ended the run: exit code 0."""


class RetryError(Exception):
    """This process cannot go on, a new one can: exit code 75. The text says why."""


class RankLostError(RetryError):
    """Another rank is gone, and its own process says why: exit code 76 where that is in another pod, else 75."""


class TerminatedError(Exception):
    """Somebody asked this process to end (SIGTERM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why a session is over."""

    kind: Literal["stop", "retry"]
    reason: str

    def throw(self) -> NoReturn:
        """Raise the error that stands for it."""
        raise StoppedError(self.reason) if self.kind == "stop" else RetryError(self.reason)
