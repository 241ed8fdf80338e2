"""Connections to an API server: of the operator, of kopf, and of the commands.

Owns: who is told who we are, and when connections are made anew. Does not own: the bounds of answers (`streamrl_pages.http_client`), what is asked,
what an answer means.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
from multidict import CIMultiDict

from streamrl.errors import UserError
from streamrl_operator.kube.rest_config import RestConfig
from streamrl_pages.http_client import BoundedResponse, Session, session


class ApiConnection:
    """Requests to one API server, in our name."""

    def __init__(self, access: RestConfig, *, agent: str) -> None:
        self.access = access
        self._made = partial(session, tls=access.tls, agent=agent)
        self._session = self._made()
        self._before: Session | None = None
        """The one before ends what it has begun: its connections still show the certificate before."""
        self._shown: str | None = None
        """Certificate of the present one, if it is one that is renewed."""

    async def aclose(self) -> None:
        """End all that is under way."""
        for each in filter(None, (self._before, self._session)):
            await each.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - as aiohttp takes it
        **options: Any,  # noqa: ANN401 - as aiohttp takes them
    ) -> AsyncIterator[BoundedResponse]:
        """The answer, whatever it is. `path`: of the API server, or a URL elsewhere, where nobody is told who we are.

        Raises:
            UserError: we have no credential, or none in time.
            aiohttp.ClientError, OSError, TimeoutError: there is no answer.
        """
        is_ours = path.startswith("/")
        way = await self._way(timeout.total) if is_ours else {"headers": CIMultiDict()}
        way["headers"].update(headers)
        url = self.access.server + path if is_ours else path
        if self._session.closed:  # aiohttp has a RuntimeError for that
            raise aiohttp.ClientConnectionError("the connection was ended")
        async with self._session.request(method, url, timeout=timeout, **way, **options) as response:
            assert isinstance(response, BoundedResponse), "the session makes no others"
            yield response

    async def websocket(self, path: str, **options: Any) -> aiohttp.ClientWebSocketResponse:  # noqa: ANN401 - as aiohttp takes them
        """A socket of the API server. Raises as a request does, and aiohttp.WSServerHandshakeError."""
        way = await self._way()
        socket: aiohttp.ClientWebSocketResponse = await self._session.ws_connect(
            self.access.server + path, **way, **options
        )
        return socket

    async def _way(self, total_s: float | None = None) -> dict[str, Any]:
        """Waits for a credential as long as the request may take. A new certificate has new connections."""
        try:
            async with asyncio.timeout(total_s):
                headers = await self.access.headers()
        except TimeoutError:
            rule, fix = f"there was no credential within {total_s:g} s", "run kubectl once with this kubeconfig"
            raise UserError(field="KUBECONFIG", rule=rule, fix=fix) from None
        if self.access.source is not None and self.access.source.certificate != self._shown:
            self._shown = self.access.source.certificate
            ended, self._before, self._session = self._before, self._session, self._made()
            if ended is not None:
                await ended.close()
        return {"headers": headers, "proxy": self.access.proxy, "server_hostname": self.access.tls_server_name}
