"""The RLJobs of the home cluster, followed by kopf.

    kopf's thread: list, watch ──▶ on.event ──▶ our loop: store ──changed(job)──▶ queue ──▶ looks

Owns kopf: its registry, its settings and its thread, since kopf stops every task of its loop when it ends. Does not own what a job
has (`kube/reflector.py` follows that, in any cluster), nor what is done about a change (`handlers.py`).

kopf tells what is there and what changes, not what was deleted while no watch ran. So each time it has listed (at the start, and after
a version that is too old), and when a look finds something gone, the jobs are compared with a list of our own. When it ends (any error
of a watch but 410 does that), it is begun again after a pause that doubles. It watches the namespaces that could be listed; one that
could not (`kube/sight.py`) is tried again, and when it can be, kopf is begun again with it.
Waits for: kopf's words; unblocked by them, by its end, or by cancellation.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import kopf

from streamrl_operator.kube.access import Access
from streamrl_operator.kube.client import PAGE, REQUEST_TIMEOUT_S, Client, Count, session
from streamrl_operator.kube.errors import KubeError
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.kube.reflector import pause_s, refill
from streamrl_operator.kube.sight import LONGEST_PAUSE_S, Sight
from streamrl_operator.kube.store import Store

log = logging.getLogger(__name__)

COMPARE_S = 1.0
"""After the first word that asks for it: lists come in pages, and doubts in bursts."""
_STEADY_S = 60.0
"""A kopf that has worked for so long had nothing to do with the failures before it."""
_STOP_S = 2.0
"""For kopf to end when it is told to; then its thread goes with the process."""


@dataclass(slots=True, kw_only=True)
class JobWatch:
    """Keeps the store of jobs equal to what the home cluster has."""

    client: Client
    find_access: Callable[[], Access]
    """For requests of kopf's own, in its own loop."""
    store: Store
    sight: Sight
    """Says which namespaces; told when the store holds all there is."""
    count: Count = lambda *_: None
    _open: set[str] = field(default_factory=set)
    """Namespaces whose jobs could be listed."""
    _doubted: asyncio.Event = field(default_factory=asyncio.Event)
    """Jobs are to be compared with a list."""

    def doubt(self) -> None:
        """A job may be gone without a word: compare what we know with a list."""
        self._doubted.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            begun_s = time.monotonic()
            try:
                await self._compare(self.sight.namespaces)
                await self._follow()
            except (KubeError, _EndedError) as error:
                failures = 1 if time.monotonic() - begun_s > _STEADY_S else failures + 1
                log.warning("watch of jobs failed", extra={"error": str(error), "failures": failures})
                asked_s = error.retry_after_s if isinstance(error, KubeError) else None
                await asyncio.sleep(pause_s(failures, asked_s=asked_s))

    async def _compare(self, namespaces: Iterable[str]) -> None:
        for namespace in namespaces:
            try:
                await refill(self.store, client=self.client, kind=RLJOB, namespace=namespace)
            except KubeError as error:
                if not self.sight.is_refused(namespace, RLJOB, error):
                    raise
                self._open.discard(namespace)
            else:
                self._open.add(namespace)
                self.sight.listed(namespace, RLJOB)

    async def _follow(self) -> None:
        """Let kopf watch, and compare where there is doubt; until other namespaces can be listed than before.

        Raises:
            _EndedError: kopf has ended.
            KubeError: jobs could not be listed.
        """
        followed, attempts = frozenset(self._open), 0
        closed = [each for each in self.sight.namespaces if each not in followed]
        async with self._kopf(followed) as ended:
            while followed == self._open:
                attempts += 1
                again_s = pause_s(attempts, longest_s=LONGEST_PAUSE_S) if closed else None
                if await self._is_doubted(ended, within_s=again_s):
                    await asyncio.sleep(COMPARE_S)
                    self._doubted.clear()
                    await self._compare(self.sight.namespaces)
                else:
                    await self._compare(closed)

    async def _is_doubted(self, ended: asyncio.Future[str], *, within_s: float | None) -> bool:
        doubted = asyncio.create_task(self._doubted.wait(), name="wait for a doubt")
        try:
            await asyncio.wait((ended, doubted), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            doubted.cancel()
        if ended.done():
            raise _EndedError(ended.result())
        return self._doubted.is_set()

    @contextlib.asynccontextmanager
    async def _kopf(self, namespaces: frozenset[str]) -> AsyncIterator[asyncio.Future[str]]:
        """kopf watches these inside the block (none: nobody does); gives why it has ended, once it has."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        ended: asyncio.Future[str] = loop.create_future()
        if not namespaces:
            yield ended
            return

        def tell(event: kopf.RawEvent) -> None:
            loop.call_soon_threadsafe(self._told, event)

        def thread() -> None:
            why = "without an error"
            try:
                asyncio.run(self._serve(namespaces, tell, stop))
            except BaseException as error:  # noqa: BLE001 - whatever ends it, it is begun again
                why = f"{type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # our loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, ended, f"kopf has ended: {why}")

        threading.Thread(target=thread, name="kopf", daemon=True).start()
        try:
            yield ended
        finally:
            stop.set()
            await asyncio.wait((ended,), timeout=_STOP_S)

    async def _serve(
        self, namespaces: frozenset[str], tell: Callable[[kopf.RawEvent], None], stop: threading.Event
    ) -> None:
        await kopf.operator(
            registry=self._registry(tell, stop),
            settings=_settings(),
            standalone=True,
            clusterwide="" in namespaces,
            namespaces=namespaces - {""},
            stop_flag=stop,
        )

    def _registry(self, tell: Callable[[kopf.RawEvent], None], stop: threading.Event) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:  # noqa: ANN401 - kopf gives more than we take
            access = self.find_access()
            return kopf.AiohttpSession(server=access.server, aiohttp_session=_session(access, count=self.count))

        group, version = RLJOB.api_version.split("/")

        @kopf.on.event(group, version, RLJOB.plural, registry=registry)
        async def changed(event: kopf.RawEvent, **_: Any) -> None:  # noqa: ANN401 - kopf gives more than we take
            tell(event)

        @kopf.on.cleanup(registry=registry)
        async def let_go(**_: Any) -> None:  # noqa: ANN401 - kopf gives more than we take
            stop.set()  # a task of kopf's waits for it, and kopf for its tasks

        return registry

    def _told(self, event: kopf.RawEvent) -> None:
        """An event of kopf's; without a type it is an object of a list."""
        obj: dict[str, Any] = {**event["object"], "apiVersion": RLJOB.api_version, "kind": RLJOB.kind}
        if event["type"] == "DELETED":
            self.store.remove(obj)
        else:
            self.store.put(obj)
        if event["type"] is None:
            self.doubt()


class _EndedError(Exception):
    """kopf has ended."""


def _settings() -> kopf.OperatorSettings:
    """kopf watches one kind and writes nothing: no events, no peering, no scan for other kinds."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.idle_timeout = 1.0  # of what it keeps for a job without news; its end waits for that
    settings.watching.chunk_size = PAGE
    settings.networking.request_timeout = REQUEST_TIMEOUT_S
    settings.process.ultimate_exiting_timeout = None
    return settings


def _session(access: Access, *, count: Count) -> aiohttp.ClientSession:
    """Requests as our own client makes them: with a token that is read again, and counted."""

    async def known(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        begun_s, status = time.monotonic(), 0
        try:
            request.headers.update(await access.headers(now_s=begun_s))
            response = await handler(request)
            status = response.status
            return response
        finally:
            count(_verb(request), RLJOB.plural, status, time.monotonic() - begun_s)

    return session(access, known)


def _verb(request: aiohttp.ClientRequest) -> str:
    if not request.url.path.endswith(f"/{RLJOB.plural}"):
        return "discover"
    return "watch" if "watch" in request.url.query else "list"


def _settle(future: asyncio.Future[str], why: str) -> None:
    if not future.done():
        future.set_result(why)
