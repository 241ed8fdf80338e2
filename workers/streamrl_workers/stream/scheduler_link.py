"""A worker's link to the scheduler: dials out, is let in, and again with pauses when it breaks.

Owns: the connections, one after the other, how long a worker goes without a scheduler, what a refusal means. Does not own what is
said over one of them (`generator/link.py`, `trainer/scheduler_connection.py`).

Invariants: nothing is said before the scheduler has let the call in; without a scheduler for `lost_after_s` the link gives up, as it
does when connections break again and again. With certificates a connection gives way to a new one before it is too old
(`channel.Dialler`): to the scheduler that is a break like any other, without the wait.
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio

from streamrl.liveness import SCHEDULER_LOST_S
from streamrl_workers.stream.auth import await_admission, call_metadata
from streamrl_workers.stream.channel import (
    LASTING_S,
    MAX_BREAKS,
    SCHEDULER,
    Backoff,
    ConnectTimeoutError,
    Dialler,
    SchedulerLostError,
    client,
    refusal_of,
)
from streamrl_workers.stream.tls import Tls

_T = TypeVar("_T")
Call: TypeAlias = "grpc.aio.StreamStreamCall"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerAddress:
    """Where the scheduler is and how long to look for it."""

    scheduler: str  # host:port
    token: str
    lost_after_s: float = SCHEDULER_LOST_S
    tls: Tls | None = None


class SchedulerLink(ABC):
    """Keeps a worker linked until it is over."""

    def __init__(self, address: SchedulerAddress, *, method: str, patience_s: float) -> None:
        """`method`: of the Scheduler service. `patience_s`: for each answer that a connection begins with; it may change."""
        self._address = address
        self._method = method
        self._patience_s = patience_s
        self._dialler = Dialler(address.scheduler, tls=address.tls)
        self._backoff = Backoff()
        self._seen_s = time.monotonic()  # until when the scheduler was there
        self._welcomed_s: float | None = None  # by the newest connection
        self.fault = "not connected to the scheduler yet"

    @property
    @abstractmethod
    def _is_over(self) -> bool:
        """Whether no connection is wanted any more."""

    @abstractmethod
    async def _converse(self, call: Call) -> bool:
        """Over a call that was let in; True: this was the last conversation."""

    @abstractmethod
    def _disconnected(self) -> None:
        """The connection is gone."""

    async def run(self) -> None:
        """Until it is over.

        Raises:
            SchedulerLostError: no scheduler for too long.
            UserError: the scheduler refuses our token or certificate.
            RefusedError, ProtocolError: the scheduler does not take what we say, or says what it must not.
        """
        while not (self._is_over or await self._connection() or self._is_over):
            if self._dialler.has_successor:
                continue
            if self._welcomed_s is not None and self._backoff.ended(after_s=self._seen_s - self._welcomed_s):
                broke = f"the connection to the scheduler broke {MAX_BREAKS} times, each within {LASTING_S:g} s"
                raise SchedulerLostError(f"{broke}; last: {self.fault}")
            silent_s = time.monotonic() - self._seen_s
            if silent_s > self._address.lost_after_s:
                awaited = f"awaited the scheduler at {self._address.scheduler} for {silent_s:.0f} s"
                raise SchedulerLostError(f"{awaited}; last: {self.fault}")
            await self._backoff.pause()
        await self._dialler.close()

    async def _read_and_write(
        self, reading: Coroutine[Any, Any, bool], writing: Coroutine[Any, Any, None], *, is_leaving: Callable[[], bool]
    ) -> bool:
        """Both sides of a call, until the scheduler has ended it or a successor takes over; True: this was the last conversation."""
        reader = asyncio.create_task(reading, name="link-reader")
        writer = asyncio.create_task(writing, name="link-writer")
        try:
            if await self._dialler.outlived(reader, writer, is_leaving=is_leaving):
                return False
            if writer.done():
                with contextlib.suppress(grpc.RpcError):  # the call is over, and the reader knows why
                    writer.result()  # a fault of ours, or we have left
            return await self._patiently(reader, missing="the scheduler did not end the link")
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.wait({reader, writer})

    async def _connection(self) -> bool:
        """One connection; True when it was the last one."""
        self._welcomed_s = None
        try:
            channel = await self._dialler.channel(timeout_s=self._address.lost_after_s)
        except ConnectTimeoutError as error:
            self.fault = str(error)
            return False
        try:
            call = getattr(client(channel, SCHEDULER), self._method)(metadata=call_metadata(self._address.token))
            try:
                await self._patiently(await_admission(call), missing="not let in")
                return await self._converse(call)
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            self._broken(error)
        finally:
            self._disconnected()
            await channel.close()
        return False

    def _welcomed(self) -> None:
        """The scheduler has taken our hello."""
        self._seen_s = self._welcomed_s = time.monotonic()
        self.fault = ""

    async def _patiently(self, awaited: Awaitable[_T], *, missing: str) -> _T:
        try:
            async with asyncio.timeout(self._patience_s):
                return await awaited
        except TimeoutError:
            raise broken(f"{missing} within {self._patience_s:g} s") from None

    def _broken(self, error: grpc.aio.AioRpcError) -> None:
        refused = refusal_of(error, address=self._address.scheduler, tls=self._address.tls)
        if refused is not None:
            raise refused from None
        fault = f"link broken: {error.code().name}: {error.details()}"
        if fault != self.fault:  # one that is not let in yet comes again every few seconds
            log.warning(fault)
        self.fault = fault


def broken(text: str) -> grpc.aio.AioRpcError:
    """A break of the link that gRPC itself does not notice."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details=text)
