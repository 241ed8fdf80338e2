"""What a rank raises, as a value that travels to rank 0, and back as an error. No torch.

`UserError` and `OSError` keep their kind: they are the user's, wherever they happen. All else is a fault of that rank.
"""

from typing import Any

from streamrl.errors import UserError
from streamrl_workers.trainer.endings import RetryError


def describe(error: Exception) -> dict[str, Any]:
    """As a value of `codec.py`."""
    if isinstance(error, UserError):
        got = None if error.got is None else str(error.got)
        return {"kind": "user", "field": error.field, "rule": error.rule, "got": got, "fix": error.fix}
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return {"kind": "os", "errno": error.errno, "strerror": error.strerror, "filename": filename}
    return {"kind": "fault", "text": f"{type(error).__name__}: {error}"}


def restore(described: dict[str, Any], *, peer: str, what: str) -> Exception:
    """The error again, on rank 0; a fault names `peer` and what it was asked for."""
    if described["kind"] == "user":
        return UserError(field=described["field"], rule=described["rule"], got=described["got"], fix=described["fix"])
    if described["kind"] == "os":
        return OSError(described["errno"], described["strerror"], described["filename"])
    return RetryError(f"{peer} failed in {what}: {described['text']}")
