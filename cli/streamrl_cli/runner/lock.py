"""One runner per run folder: an advisory lock that dies with its holder."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrl.errors import UserError


@contextmanager
def hold(path: Path, *, run: str) -> Iterator[None]:
    """Hold the lock file `path`.

    Raises:
        UserError: another process holds it.
    """
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                field=run, rule="is in use by another `streamrl run`", fix="wait for it to end, or stop it with Ctrl-C"
            ) from None
        yield
