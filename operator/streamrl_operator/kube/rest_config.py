"""How an API server is reached: address, trust, and who we are.

Owns: when a credential is read again. Does not own: where all this is written (`kubeconfig.py`), how a credential is had
(`credentials.py`, `oidc.py`), requests (`connections.py`).
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import ClassVar, Protocol

from multidict import CIMultiDict

from streamrl.errors import UserError

TOKEN_AGE_S = 60.0
"""A token is asked for again after so long; kubelet renews those of pods long before they end."""
_PAUSE_S = 5.0
"""Between two questions of which the first failed, or whose token is not believed: every request of ours would ask."""

log = logging.getLogger(__name__)


class TokenSource(Protocol):
    """What knows our token of today."""

    pause_s: ClassVar[float]
    """At least so long between two questions."""

    @property
    def certificate(self) -> str | None:
        """Client certificate that `token` has put into `tls`: connections that are open show the one before."""
        ...

    async def token(self, *, tls: ssl.SSLContext | None) -> str | None:
        """The token; None where a client certificate, which is put into `tls`, says who we are.

        Raises:
            UserError: it has none.
        """
        ...


@dataclass(slots=True, kw_only=True)
class RestConfig:
    """One API server, and how to show it who we are."""

    server: str
    """https://host:port, without a slash at the end."""
    tls: ssl.SSLContext | None
    """None: plain HTTP (a proxy on the same machine)."""
    tls_server_name: str | None = None
    """Name in its certificate, where that is not the host of `server`."""
    proxy: str | None = None
    """Address of an HTTP proxy, through which alone it is reached."""
    namespace: str = "default"
    """Of the context: what is meant where nobody names one."""
    token: str | None = field(default=None, repr=False)
    source: TokenSource | None = None
    """Of a token that changes."""
    impersonation: tuple[tuple[str, str], ...] = ()
    """Headers: in whose name we act."""
    _read_s: float = float("-inf")
    """When the latest question had ended, and when that is due next, by a monotonic clock."""
    _due_s: float = float("-inf")
    _problem: UserError | None = None
    """Of the latest question, if there is no token that may be used without it."""
    _asking: asyncio.Task[None] | None = None
    """The latest question. All requests wait for the same one, and it outlives those that wait no longer."""

    async def headers(self, *, clock: Callable[[], float] = monotonic) -> CIMultiDict[str]:
        """Headers that say who we are.

        Raises:
            UserError: there is no credential. Where there was one it is used until the API server does not believe it.
        """
        if self.source is not None:
            if self._asking is None or (self._asking.done() and clock() >= self._due_s):
                self._asking = asyncio.create_task(self._renew(self.source, clock), name="renew credential")
            await asyncio.shield(self._asking)
            if self._problem is not None:
                raise self._problem
        who = (("Authorization", f"Bearer {self.token}"),) if self.token else ()
        headers = CIMultiDict((*who, *self.impersonation))
        if not all(map(str.isprintable, headers.values())):
            raise UserError(field="KUBECONFIG", rule="the token and names in `as` must each be one line of text")
        return headers

    def forget(self) -> None:
        """The API server did not believe the token: ask for it again before the next request."""
        self._due_s = min(self._due_s, self._read_s + (self.source.pause_s if self.source else 0.0))

    async def _renew(self, source: TokenSource, clock: Callable[[], float]) -> None:
        try:
            self.token = await source.token(tls=self.tls)
            self._problem, age_s = None, TOKEN_AGE_S
        except UserError as error:
            log.warning("credential is not renewed", extra={"error": str(error)})
            self._problem, age_s = None if self.token else error, _PAUSE_S
        self._read_s = clock()
        self._due_s = self._read_s + age_s
