"""What can go wrong at an API server, in the words of the caller's next move. Foreign errors are translated here."""

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """A request was not done.

    Args:
        what: verb and path of the request.
        status: HTTP status; 0 = no answer.
        reason: one word: the API server's, or ours.
        message: one line.
        retry_after_s: how long the API server asks us to wait.
    """

    def __init__(
        self, what: str, *, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}: {status or 'no answer'} {reason}: {message}")


class NotFoundError(KubeError):
    """It is not there (any more)."""


class ConflictError(KubeError):
    """It has changed since it was read, or exists already: look again."""


class ExpiredError(KubeError):
    """The version to go on from is too old: list again."""


class RefusedError(KubeError):
    """The API server will not have it, however often we ask: wrong or forbidden."""


class ForbiddenError(RefusedError):
    """We have no right to it."""


class UnavailableError(KubeError):
    """The API server is overloaded, broken or out of reach: ask later."""


_BY_STATUS: dict[int, type[KubeError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: ExpiredError,
    408: UnavailableError,
    429: UnavailableError,
}
SERVER_ERROR = 500
_NOT_IN_SCHEMA = "failed to create typed patch object"
"""With it an API server answers 500 to an apply with a field that it does not know: the body's fault, however often it is sent."""
_MAX_MESSAGE_CHARS = 500


def from_status(what: str, status: int, body: object, retry_after: str | None = None) -> KubeError:
    """The error that an answer other than 2xx stands for; `body` is a Status object where the API server wrote one."""
    details: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    message = str(details.get("message") or body or "no message")
    is_broken = status >= SERVER_ERROR and not message.startswith(_NOT_IN_SCHEMA)
    found = _BY_STATUS.get(status) or (UnavailableError if is_broken else RefusedError)
    asked = (
        retry_after
        if retry_after and retry_after.isdigit()
        else (details.get("details") or {}).get("retryAfterSeconds")
    )
    return found(
        what,
        status=status,
        reason=str(details.get("reason") or "Error"),
        message=" ".join(message.split())[:_MAX_MESSAGE_CHARS],
        retry_after_s=float(asked) if asked else None,
    )
