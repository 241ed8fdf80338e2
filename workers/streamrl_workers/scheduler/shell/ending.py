"""How the scheduler's process ends: decided once, by whoever sees the reason first."""

import asyncio
import traceback
from dataclasses import dataclass

from streamrl.errors import EXIT_DONE, EXIT_FAULT, EXIT_RETRY, EXIT_USER_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Exit code and the line that says why ("" if nothing needs saying)."""

    exit_code: int
    line: str = ""
    finished_step: int | None = None
    """Set when the run is over: training steps done."""


class EndingBox:
    """Holds the ending until somebody waits for it; the first one counts."""

    def __init__(self) -> None:
        self._future: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.was_asked = False
        """Whether somebody has asked the process to end, before or after it knew that it would."""

    def finished(self, step: int) -> None:
        """The run has ended well."""
        self._set(Ending(exit_code=EXIT_DONE, finished_step=step))

    def user_error(self, line: str) -> None:
        """Something that the user wrote cannot be honoured."""
        self._set(Ending(exit_code=EXIT_USER_ERROR, line=line))

    def retry(self, line: str) -> None:
        """The process can be started again and goes on from the journal."""
        self._set(Ending(exit_code=EXIT_RETRY, line=line))

    def asked(self, line: str) -> None:
        """SIGTERM."""
        self.was_asked = True
        self.retry(line)

    def fault(self, error: BaseException) -> None:
        """A mistake of our own: go no further in a state that nobody understands."""
        trace = "".join(traceback.format_exception(error))
        self._set(Ending(exit_code=EXIT_FAULT, line=f"internal error\n{trace}"))

    @property
    def ending(self) -> Ending | None:
        """The ending, if it is decided."""
        return self._future.result() if self._future.done() else None

    async def wait(self) -> Ending:
        """Wait for the run's end: the one wait without a deadline, as a run takes as long as it takes."""
        return await asyncio.shield(self._future)

    def _set(self, ending: Ending) -> None:
        if not self._future.done():
            self._future.set_result(ending)
