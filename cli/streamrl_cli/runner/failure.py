"""How a run that cannot go on is told: one line, from what the failed process said of itself."""

from pathlib import Path

from streamrl.errors import EXIT_FAULT, EXIT_USER_ERROR


class RunFailedError(Exception):
    """The run cannot go on. The text is one line for the user.

    Args:
        text: the line.
        exit_code: of `streamrl run`: a worker that refused the user's input makes it `EXIT_USER_ERROR`.
    """

    def __init__(self, text: str, *, exit_code: int = EXIT_FAULT) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def failed(*, reason: str, exit_code: int, log: Path, since_bytes: int = 0) -> RunFailedError:
    """The failure of a process that left with `exit_code`; what it said stands in `log` behind `since_bytes`.

    A process that refused the user's input has said so in a whole line already.
    """
    said = last_line(log, since_bytes=since_bytes)
    if exit_code == EXIT_USER_ERROR:
        return RunFailedError(said, exit_code=EXIT_USER_ERROR)
    return RunFailedError(f"{reason}: {said}; see {log}")


def last_line(log: Path, *, since_bytes: int = 0) -> str:
    """The last line of a log that says something; what a failed process said of itself.

    `since_bytes`: size of the log when the process began, as earlier ones have written to it too.
    """
    try:
        text = log.read_bytes()[since_bytes:].decode("utf-8", errors="replace")
    except OSError as error:
        return f"{log.name} cannot be read: {error.strerror}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
