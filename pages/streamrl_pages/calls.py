"""Programs that call with JSON and a bearer token: paths, bounded bodies, errors in the shape that the caller knows.

Owns: what a call looks like to its handler. Does not own the port (`server.py`), nor what tokens mean.

Invariants: a body is read when its handler asks for it, and kept up to its bound. A handler that waits for long holds its
connection; all others end by the server's deadline.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

NOT_FOUND, NOT_ALLOWED, TOO_LARGE = 404, 405, 413
_BEARER = "bearer "
DISCARDED_BYTES = 64 << 20
"""Of a body that is too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a call is answered with."""

    text: str
    status: int = 200
    media_type: str = "application/json"


class HttpCall:
    """One request."""

    def __init__(self, request: Request, *, most_bytes: int) -> None:
        self._request = request
        self._most_bytes = most_bytes
        self.headers: Mapping[str, str] = request.headers
        """By names in lower case."""

    @property
    def token(self) -> str:
        """Of its authorization; "" where there is none."""
        value = self.headers.get("authorization", "")
        return value[len(_BEARER) :].strip() if value.lower().startswith(_BEARER) else ""

    def admit(self) -> None:
        """Keep its place from strangers: the caller is known."""
        self._request.scope["state"]["admit"]()

    def hold(self) -> None:
        """Its answer may take long: no deadline ends its connection."""
        self._request.scope["state"]["hold"]()

    async def body(self) -> bytes | None:
        """All of it; None where it is larger than its bound. Then it is read and thrown away: a client that is cut off hears no answer."""
        parts, size = bytearray(), 0
        async for part in self._request.stream():
            size += len(part)
            if size <= self._most_bytes:
                parts += part
            elif size > self._most_bytes + DISCARDED_BYTES:
                break
        return bytes(parts) if size <= self._most_bytes else None


Handler = Callable[[HttpCall], Awaitable[Reply]]


def calls(routes: Mapping[tuple[str, str], Handler], *, refused: Callable[[int], Reply], most_bytes: int) -> ASGIApp:
    """The application.

    Args:
        routes: (method, path) -> what answers.
        refused: the reply of this status where nothing answers: 404 or 405.
        most_bytes: of a body.
    """
    paths = {path for _, path in routes}

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        handler = routes.get((request.method, request.url.path))
        if handler is None:
            reply = refused(NOT_ALLOWED if request.url.path in paths else NOT_FOUND)
        else:
            try:
                reply = await handler(HttpCall(request, most_bytes=most_bytes))
            except ClientDisconnect:
                return
        response = Response(reply.text, status_code=reply.status, media_type=reply.media_type)
        await response(scope, receive, send)

    return application
