"""Which of several operators acts: the one that holds a Lease (coordination.k8s.io).

Owns: taking, renewing and giving back. Invariants: one that cannot renew stops acting before another may begin (`renew_s` of trying <
`lease_s`); times written by another machine are never compared with our clock, only whether they change.
Waits for: the API server and the other holder's time; unblocked by time or cancellation.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl_operator.clock import OperatorClock, timestamp
from streamrl_operator.kube.answers import ConflictError, ForbiddenError, KubeError, NotFoundError
from streamrl_operator.kube.client import Client
from streamrl_operator.kube.kinds import LEASE

log = logging.getLogger(__name__)

_RELEASE_S = 1.0
"""For giving the Lease back at the end; without it the next one waits for our time to be over."""
_STOP_S = 3.0
"""For the work to end when it is told to."""


class LeaseLostError(Exception):
    """Another may act now, so we must not: this process ends and begins again as a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Times of the Lease."""

    lease_s: float = 15.0
    """Without a renewal for so long, another takes it."""
    renew_s: float = 10.0
    """Without success for so long, the holder gives up."""
    retry_s: float = 2.0
    """Between two attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLease:
    """The Lease as we saw it last, and when it last changed before our eyes."""

    version: str
    holder: str
    lease_s: float
    since_s: float


def observed_lease(lease: Mapping[str, Any], before: ObservedLease | None, *, now_s: float) -> ObservedLease:
    """The Lease seen now; one that did not change goes on being as old as it was."""
    version, spec = lease["metadata"]["resourceVersion"], lease.get("spec") or {}
    if before is not None and before.version == version:
        return before
    return ObservedLease(
        version=version,
        holder=spec.get("holderIdentity") or "",
        lease_s=float(spec.get("leaseDurationSeconds") or 0),
        since_s=now_s,
    )


def may_take(seen: ObservedLease, *, me: str, now_s: float) -> bool:
    """Whether the Lease is ours, nobody's, or was not renewed for its time."""
    return seen.holder in ("", me) or now_s - seen.since_s >= seen.lease_s


def unled(seen: ObservedLease | None, *, problem: str, now_s: float) -> str:
    """Why nobody is known to lead, to one that does not; empty if somebody does. `problem`: of the latest attempt, if it failed."""
    if seen is not None and seen.holder and now_s - seen.since_s < seen.lease_s:
        return ""
    return f"nobody leads: {problem or 'waits for the Lease'}"


def held(lease: Mapping[str, Any], *, me: str, lease_s: float, moment: str) -> dict[str, Any]:
    """The Lease as we write it when we take or renew it; `me` empty: given back."""
    spec = lease.get("spec") or {}
    changes_hands = spec.get("holderIdentity") != me
    renewed = {
        "holderIdentity": me,
        "leaseDurationSeconds": max(1, round(lease_s)),
        "acquireTime": moment if changes_hands else spec.get("acquireTime"),
        "renewTime": moment,
        "leaseTransitions": int(spec.get("leaseTransitions") or 0) + (changes_hands and bool(me)),
    }
    return {**lease, "spec": {**spec, **renewed}}


@dataclass(slots=True, kw_only=True)
class Leader:
    """A candidate, and while it holds the Lease the leader."""

    client: Client
    namespace: str
    name: str
    me: str
    lease_settings: LeaseSettings
    clock: OperatorClock
    leading: Callable[[bool], None] = lambda _: None
    """Told when it begins and when it ends."""
    is_leading: bool = False
    _seen: ObservedLease | None = None
    _lease: dict[str, Any] = field(default_factory=dict)
    _problem: str = ""
    """Of the latest attempt, if it failed."""

    async def lead(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the Lease, then work for as long as it is ours.

        Raises:
            LeaseLostError: it could not be renewed.
        """
        begun_s = self.clock.monotonic()
        while not await self._try():
            await asyncio.sleep(self.lease_settings.retry_s)
            begun_s = self.clock.monotonic()
        log.info("leading", extra={"lease": self.name, "holder": self.me})
        self._tell(is_leading=True)
        task = asyncio.create_task(work(), name="work of the leader")
        renewing = asyncio.create_task(self._renew(begun_s), name="renewal of the Lease")
        try:
            await asyncio.wait((task, renewing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._tell(is_leading=False)
            renewing.cancel()
            task.cancel()
            await asyncio.wait((task, renewing), timeout=_STOP_S)
            if not _failed(renewing):
                await self._release()
        for done in (renewing, task):
            if done.done() and not done.cancelled():
                done.result()

    def unled(self) -> str:
        """Why nobody is known to lead, empty if somebody does."""
        return "" if self.is_leading else unled(self._seen, problem=self._problem, now_s=self.clock.monotonic())

    def _tell(self, *, is_leading: bool) -> None:
        self.is_leading = is_leading
        self.leading(is_leading)

    async def _renew(self, renewed_s: float) -> None:
        """`renewed_s`: when the last good attempt began. The others count from the write, and its answer may come much later."""
        while True:
            await asyncio.sleep(self.lease_settings.retry_s)
            begun_s = self.clock.monotonic()
            # A process that was starved of CPU comes late: while nobody has taken the Lease, it is still its own.
            left_s = renewed_s + self.lease_settings.renew_s - begun_s
            if await self._try(timeout_s=max(left_s, self.lease_settings.retry_s)):
                renewed_s = begun_s
                continue
            is_taken = self._seen is not None and self._seen.holder not in ("", self.me)
            if is_taken or self.clock.monotonic() - renewed_s >= self.lease_settings.renew_s:
                raise LeaseLostError(f"Lease {self.name} could not be renewed within {self.lease_settings.renew_s:g} s")

    async def _try(self, *, timeout_s: float | None = None) -> bool:
        """Take or renew; False if it is another's, or the API server did not do it in time."""
        try:
            async with asyncio.timeout(timeout_s or self.lease_settings.renew_s):
                is_ours, self._problem = await self._take(), ""
                return is_ours
        except ConflictError:
            return False
        except (KubeError, TimeoutError) as error:
            fix = "; grant the rules of the chart's rbac/operator.yaml" if isinstance(error, ForbiddenError) else ""
            self._problem = f"{str(error) or 'no answer'}{fix}"
            log.warning("lease not renewed", extra={"lease": self.name, "error": self._problem})
            return False

    async def _take(self) -> bool:
        if self._seen is not None and self._seen.holder == self.me:
            with contextlib.suppress(ConflictError):  # as we left it, as a rule: no need to ask
                self._saw(await self.client.replace(LEASE, self._mine(self._lease)))
                return True
        try:
            lease = await self.client.get(LEASE, namespace=self.namespace, name=self.name)
        except NotFoundError:
            fresh = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"name": self.name, "namespace": self.namespace},
            }
            self._saw(await self.client.create(LEASE, self._mine(fresh)))
            return True
        self._saw(lease)
        assert self._seen is not None, "it was seen on the line before"
        if not may_take(self._seen, me=self.me, now_s=self.clock.monotonic()):
            return False
        self._saw(await self.client.replace(LEASE, self._mine(lease)))
        return True

    async def _release(self) -> None:
        """Give the Lease back, if it is still ours: a renewal may have been cut off after it was done."""
        try:
            async with asyncio.timeout(_RELEASE_S):
                lease = await self.client.get(LEASE, namespace=self.namespace, name=self.name)
                if (lease.get("spec") or {}).get("holderIdentity") == self.me:
                    moment = timestamp(self.clock.now())
                    await self.client.replace(LEASE, held(lease, me="", lease_s=1, moment=moment))
        except (KubeError, TimeoutError) as error:
            log.warning("lease not given back", extra={"lease": self.name, "error": str(error) or "no answer"})

    def _mine(self, lease: Mapping[str, Any]) -> dict[str, Any]:
        return held(lease, me=self.me, lease_s=self.lease_settings.lease_s, moment=timestamp(self.clock.now()))

    def _saw(self, lease: dict[str, Any]) -> None:
        self._lease = lease
        self._seen = observed_lease(lease, self._seen, now_s=self.clock.monotonic())


def _failed(task: asyncio.Future[None]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None
