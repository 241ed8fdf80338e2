"""Connections that are given up for new ones before they are too old: make before break.

A channel keeps the certificates that it was opened with. So a link opens a second one after a share of a connection's
longest life, and lets go of the first only when the second is connected: new certificates that do not work cost
nothing until the server ends the old connection. Without TLS a connection lives as long as it lives.

Owns the new channel until somebody takes it. Loop: consumes time; produces a connected channel; waits for the moment, then
for the server (no deadline: the old connection serves meanwhile); unblocked by `close`.
"""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

import grpc.aio

from streamrl_workers.stream.channel import Backoff, ConnectTimeoutError, connect
from streamrl_workers.stream.tls import Tls

_SHARE = 0.75
"""Of a connection's longest life: the server's own bound varies by a tenth and then waits a grace."""
_ATTEMPT_S = 10.0
_LONGEST_PAUSE_S = 30.0
"""Between attempts."""


class Renewal:
    """The successor of one connection; use as a context around the connection's life."""

    def __init__(self, address: str, *, who: str, tls: Tls | None) -> None:
        self._address = address
        self._who = who
        self._tls = tls
        self._task: asyncio.Task[grpc.aio.Channel] | None = None
        self._never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def due(self) -> "asyncio.Future[grpc.aio.Channel] | asyncio.Future[None]":
        """Done when the successor is connected."""
        return self._never if self._task is None else self._task

    def take(self) -> grpc.aio.Channel:
        """The successor; it is the caller's now."""
        assert self._task is not None, "nothing is due"
        task, self._task = self._task, None
        return task.result()

    async def _open(self, tls: Tls) -> grpc.aio.Channel:
        await asyncio.sleep(_SHARE * tls.age_s)
        backoff = Backoff(limit_s=_LONGEST_PAUSE_S)
        while True:
            with contextlib.suppress(ConnectTimeoutError):
                return await connect(self._address, timeout_s=_ATTEMPT_S, who=self._who, tls=tls)
            await backoff.pause()

    async def __aenter__(self) -> Self:
        if self._tls is not None:
            self._task = asyncio.create_task(self._open(self._tls), name=f"renewal of {self._who}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._never.cancel()
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled() and self._task.exception() is None:
            await self._task.result().close()
