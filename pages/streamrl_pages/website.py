"""Pages for people over HTTP: who may see them, and what a browser may do with them.

Owns: the token, the names by which a browser may call the server, the headers of every answer, the stream that says when a page has changed.
Does not own: what the pages say (callables), nor the port (`server.py`).

    browser  --/session, Authorization: Bearer TOKEN-->  cookie     once; scripts cannot read it, and no other site sends it
             --GET, with the cookie-->                   a page     or with the header, from a program
             --GET /changes/PATH-->                      a line for each change of that page, while it is looked at

Invariants:
- Without the token nothing is answered but the sign-in page and the files of `assets`, which hold no data.
- A name of the server that was not allowed is refused (a stranger's name that points here: DNS rebinding). An address is always allowed: no
  stranger's page has it.
- GET and HEAD alone. A page's policy lets no script run but the files of `assets`, and nothing be fetched from elsewhere.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamrl.errors import UserError, UserErrors

TIMEOUT_S = 60.0
"""For one request of an application with pages: its streams end a little earlier, and the browser asks again."""
_STREAM_S = 50.0
_LOOK_EVERY_S = 1.0
"""A run's files grow once a second."""
_READERS = 2
"""Pages that are made at a time: a large run takes memory."""
_STREAMS = 64
_KEPT = "private, max-age=31536000, immutable"
"""An asset's address changes with its text."""
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Styles within the page: plotly.js sets them on what it draws."""
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a page is asked for."""

    parts: Mapping[str, str]
    """The variable parts of its path."""
    query: Mapping[str, str]
    chosen: tuple[str, ...] = ()
    """All values of `run` in the query."""


class Pages(Protocol):
    """What an application shows. All of it is called in threads. `UserError`: there is no such page, or its data cannot be read."""

    def html(self, path: str, asked: Asked, *, state: str) -> str:
        """The page at one of `paths`; it bears the state that it is at least as new as."""

    def stamp(self, path: str, asked: Asked) -> str:
        """Another text each time when that page has changed."""

    def error(self, line: str, *, state: str) -> str:
        """The page that says what is wrong, until the state is another one."""

    def sign_in(self) -> str:
        """The page that takes the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file that belongs to the pages."""

    text: str
    media_type: str


def website(
    pages: Pages, *, paths: tuple[str, ...], assets: Mapping[str, Asset], token: str, names: frozenset[str]
) -> ASGIApp:
    """The application.

    Args:
        pages: what it shows.
        paths: of the pages, as Starlette writes them (`/runs/{run}`).
        assets: name under `/static/` -> file.
        token: without it nothing is shown.
        names: by which browsers may call it, in lower case, without a port. Addresses and `localhost` need not be there.
    """
    streams, readers = asyncio.Semaphore(_STREAMS), asyncio.Semaphore(_READERS)

    def page(path: str) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> Response:
            asked = _asked(request)
            async with readers:
                state = await asyncio.to_thread(_state, pages, path, asked)
                try:
                    return HTMLResponse(await asyncio.to_thread(pages.html, path, asked, state=state))
                except (UserError, UserErrors) as error:
                    return HTMLResponse(pages.error("\n".join(error.lines), state=state), status_code=404)

        return endpoint

    def changes(path: str) -> Callable[[Request], object]:
        async def endpoint(request: Request) -> Response:
            if streams.locked():
                return PlainTextResponse("too many open pages", status_code=503)
            return StreamingResponse(_changes(pages, path, _asked(request), streams), media_type="text/event-stream")

        return endpoint

    async def static(request: Request) -> Response:
        asset = assets.get(request.path_params["name"])
        if asset is None:
            return PlainTextResponse("Not Found", status_code=404)
        return Response(asset.text, media_type=asset.media_type, headers={"cache-control": _KEPT})

    routes = [Route("/static/{name}", static, methods=["GET"])]
    for path in paths:
        routes += [Route(path, page(path), methods=["GET"]), Route(f"/changes{path}", changes(path), methods=["GET"])]
    return _Door(Router(routes, redirect_slashes=False), pages=pages, token=token, names=names)


def _asked(request: Request) -> Asked:
    query = request.query_params
    return Asked(parts=dict(request.path_params), query=dict(query), chosen=tuple(query.getlist("run")))


async def _changes(pages: Pages, path: str, asked: Asked, streams: asyncio.Semaphore) -> AsyncIterator[str]:
    """The state of a page, and each later one."""
    loop = asyncio.get_running_loop()
    until_s, told = loop.time() + _STREAM_S, ""
    async with streams:
        yield "retry: 1000\n\n"
        while loop.time() < until_s:
            state = await asyncio.to_thread(_state, pages, path, asked)
            if state != told:
                yield f"data: {state}\n\n"
                told = state
            await asyncio.sleep(_LOOK_EVERY_S)


def _state(pages: Pages, path: str, asked: Asked) -> str:
    try:
        stamp = pages.stamp(path, asked)
    except (UserError, UserErrors):
        return "gone"
    return hashlib.blake2b(stamp.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class _Door:
    """Lets requests through that may see the pages, and adds the headers."""

    def __init__(self, inner: ASGIApp, *, pages: Pages, token: str, names: frozenset[str]) -> None:
        self._inner, self._pages, self._names = inner, pages, names
        self._bearer = f"Bearer {token}".encode()
        # Another cookie each time the server starts; cookies know no port, so two servers on one machine need two names.
        self._cookie = f"streamrl-{secrets.token_hex(4)}", secrets.token_urlsafe(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def dressed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._refused(Request(scope)) or self._inner
        await answer(scope, receive, dressed)

    def _refused(self, request: Request) -> Response | None:
        if not self._is_ours(request.headers.get("host", "")):
            return PlainTextResponse(
                "this name is not the server's: see `streamrl ui --help`, --name\n", status_code=421
            )
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("Method Not Allowed", status_code=405, headers={"allow": "GET, HEAD"})
        path = request.url.path
        if path.startswith("/static/"):
            return None
        has_token = hmac.compare_digest(request.headers.get("authorization", "").encode(), self._bearer)
        if path == "/session" and has_token:
            return self._session()
        name, value = self._cookie
        if has_token or hmac.compare_digest(request.cookies.get(name, "").encode(), value.encode()):
            request.scope["state"]["admit"]()
            return None
        return HTMLResponse(self._pages.sign_in(), status_code=401, headers={"www-authenticate": "Bearer"})

    def _session(self) -> Response:
        answer = Response(status_code=204)
        name, value = self._cookie
        answer.set_cookie(name, value, httponly=True, samesite="strict", path="/")
        return answer

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            if name == "localhost" or name in self._names:
                return True
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True
