"""The RLJobs of the home cluster, followed by kopf: one kopf for each namespace that the operator watches.

    kopf's thread: list, watch ──▶ on.event ──▶ our loop: store ──changed(job)──▶ queue ──▶ reconcile

Owns kopf: its registry, its settings and its threads, since kopf stops every task of its loop when it ends. Does not own what a job
has (`cache.py` follows that, in any cluster), nor what is done about a change (`controller.py`).

kopf tells what is there and what changes, not what was deleted while no watch ran, nor what it is refused. So a list of our own comes
before each kopf, and after each doubt: kopf has listed, is refused, or a reconcile finds something gone. A kopf that has ended (any error
of a watch but 410 does that), or that has asked the API server for nothing for `SILENT_S`, is replaced after the list's pause.
Namespaces know nothing of each other: one that is refused leaves the others as they are.
Waits for: kopf's words; unblocked by them, by its end, by its silence, or by cancellation.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import UnusableError
from streamrl_operator.kube.cache import Reflector, log
from streamrl_operator.kube.client import AGENT, REQUEST_TIMEOUT_S
from streamrl_operator.kube.kinds import RLJOB, Kind
from streamrl_pages.http_client import MOST_BYTES, Session, session
from streamrl_pages.http_fetch import one_line

COMPARE_S = 1.0
"""After the first word that asks for a list: kopf's own come in pages, and doubts in bursts."""
SILENT_S = 150.0
"""Without a request for so long, kopf follows nothing, whatever it waits for. It waits 55 s at most between two attempts."""
_WATCH_S = 60
"""A watch of kopf's ends after so long and begins again: by that it is seen to be there."""
_PAGE = MOST_BYTES // (3 * 2**20)
"""Objects of one page of a list of kopf's, which asks for no smaller ones: so many of the largest fit."""
_REDIRECTS, _UNAUTHORIZED, _REFUSED, _ERRORS = 300, 401, (403, 404), 400
_STOP_S = 2.0
"""For kopf to end when it is told to, each time that it is."""


@dataclass(slots=True, kw_only=True)
class JobWatch(Reflector):
    """Keeps the store of jobs equal to what one namespace has (empty: all)."""

    kind: Kind = RLJOB
    _doubted: asyncio.Event = field(default_factory=asyncio.Event)
    """The jobs are to be compared with a list."""
    _asked_s: float = 0.0
    """Monotonic clock: kopf's latest request, or its begin."""
    _begins: int = 0

    @property
    def restarts(self) -> int:
        """Times that kopf was begun again."""
        return max(0, self._begins - 1)

    def doubt(self) -> None:
        """A job may be gone without a word, or the namespace not be ours any more: compare what we know with a list."""
        self._doubted.set()

    async def _watch(self) -> None:
        """Let kopf watch, and compare where there is doubt.

        Raises:
            KubeError: kopf has ended or does nothing, or jobs could not be listed.
        """
        self._version = ""  # nobody knows how far kopf has come: what follows it begins with a list
        async with self._kopf() as ended:
            while True:
                await self._told_something(ended)
                if ended.done():
                    raise _kopf_error(f"it has ended: {ended.result()}")
                if self._doubted.is_set():
                    await asyncio.sleep(COMPARE_S)
                    self._doubted.clear()
                    await self._list()
                    self._version = ""
                if time.monotonic() - self._asked_s > SILENT_S:
                    raise _kopf_error(f"it has asked for nothing for {SILENT_S:g} s")

    async def _told_something(self, ended: asyncio.Future[str]) -> None:
        """Wait for a doubt or for kopf's end, for as long as kopf may keep silent."""
        doubted = asyncio.create_task(self._doubted.wait(), name="wait for a doubt")
        try:
            left_s = self._asked_s + SILENT_S - time.monotonic()
            await asyncio.wait((ended, doubted), timeout=max(0.0, left_s) + 0.01, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doubted.cancel()

    @contextlib.asynccontextmanager
    async def _kopf(self) -> AsyncIterator[asyncio.Future[str]]:
        """kopf watches inside the block; gives why it has ended, once it has."""
        ours, runner = asyncio.get_running_loop(), asyncio.Runner(loop_factory=asyncio.new_event_loop)
        ended: asyncio.Future[str] = ours.create_future()
        theirs = runner.get_loop()
        serving = theirs.create_task(self._serve(ours), name="kopf")
        self._asked_s = time.monotonic()
        self._begins += 1

        def thread() -> None:
            why = "without an error"
            try:
                with runner:
                    runner.run(_join(serving))
            except BaseException as error:  # noqa: BLE001 - whatever ends it, it is begun again
                why = one_line(error)
            with contextlib.suppress(RuntimeError):  # our loop is closed: nobody waits
                ours.call_soon_threadsafe(_settle, ended, why)

        threading.Thread(target=thread, name="kopf", daemon=True).start()
        try:
            yield ended
        finally:
            for _ in range(2):  # a cancellation that comes while a watch of kopf's begins again is lost in it
                if not ended.done():
                    with contextlib.suppress(RuntimeError):  # its loop is closed: it ends now
                        theirs.call_soon_threadsafe(serving.cancel)
                    await asyncio.wait((ended,), timeout=_STOP_S)

    async def _serve(self, ours: asyncio.AbstractEventLoop) -> None:
        """kopf, in its own loop, until cancelled. It leaves its sessions open where it is cancelled."""
        sessions: list[Session] = []
        try:
            await kopf.operator(
                registry=self._registry(ours, sessions),
                settings=_settings(),
                standalone=True,
                clusterwide=not self.namespace,
                namespaces=[self.namespace] if self.namespace else [],
            )
        finally:
            for each in sessions:
                await each.close()

    def _registry(self, ours: asyncio.AbstractEventLoop, sessions: list[Session]) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:  # noqa: ANN401 - kopf gives more than we take
            sessions.append(self._session(ours))
            return kopf.AiohttpSession(server=self.client.access.server, aiohttp_session=sessions[-1])

        group, version = RLJOB.api_version.split("/")

        @kopf.on.event(group, version, RLJOB.plural, registry=registry)
        async def changed(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf gives more than we take
            ours.call_soon_threadsafe(self._reported, event)

        return registry

    def _session(self, ours: asyncio.AbstractEventLoop) -> Session:
        """Requests as our own client makes them: who we are is asked in our loop, and they are counted."""
        access = self.client.access

        async def known(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            begun_s, status = time.monotonic(), 0
            self._asked_s = begun_s
            try:
                asked = asyncio.run_coroutine_threadsafe(access.headers(), ours)
                who = await asyncio.wrap_future(asked)
                request.headers.update(who)
                request.server_hostname = access.tls_server_name
                response = await handler(request)
                status = response.status
                if status == _UNAUTHORIZED:
                    ours.call_soon_threadsafe(access.forget)
                elif status in _REFUSED:
                    ours.call_soon_threadsafe(self.doubt)
                elif _REDIRECTS <= status < _ERRORS:
                    raise aiohttp.ClientConnectionError(f"{status}: no redirect is followed")
                return response
            finally:
                self.client.count(_verb(request), RLJOB.plural, status, time.monotonic() - begun_s)

        return session(known, tls=access.tls, agent=AGENT, proxy=access.proxy)

    def _reported(self, event: kopf.RawEvent) -> None:
        """An event of kopf's; without a type it is an object of a list."""
        stamp = {"apiVersion": RLJOB.api_version, "kind": RLJOB.kind}
        try:
            obj = answers.check({**event["object"], **stamp}, RLJOB)
        except answers.MalformedError as error:
            log.warning("event of a job is none", extra={"error": str(error)})
            self.doubt()
            return
        if event["type"] == "DELETED":
            self.store.remove(obj)
        else:
            self.store.put(obj)
        if event["type"] is None:
            self.doubt()
        else:
            self._failures = 0


def _kopf_error(why: str) -> UnusableError:
    return UnusableError("watch of jobs by kopf", status=0, reason="KopfEnded", message=why)


def _settings() -> kopf.OperatorSettings:
    """kopf watches one kind and writes nothing: no events, no peering, no scan for other kinds."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = 1.0  # of what it keeps for a job without news; its end waits for that
    settings.watching.chunk_size = _PAGE
    settings.watching.server_timeout = _WATCH_S
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.process.ultimate_exiting_timeout = None
    return settings


async def _join(serving: asyncio.Task[None]) -> None:
    await serving


def _verb(request: aiohttp.ClientRequest) -> str:
    if not request.url.path.endswith(f"/{RLJOB.plural}"):
        return "discover"
    return "watch" if "watch" in request.url.query else "list"


def _settle(future: asyncio.Future[str], why: str) -> None:
    if not future.done():
        future.set_result(why)
