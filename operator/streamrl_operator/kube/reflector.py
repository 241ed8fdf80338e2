"""Keeps a `Store` equal to what an API server has: list, then watch from there, for ever.

Waits for: the API server; unblocked by its answer, the request's deadline, or cancellation. After any doubt (a version too old, an
error in the stream) it lists again, and what the list lacks is gone from the store: a deletion that nobody told us of is not missed.
Where it is refused (`sight.py`) it goes on asking.
"""

import asyncio
import logging
import random
from dataclasses import dataclass

from streamrl_operator.kube.client import Client
from streamrl_operator.kube.errors import ExpiredError, KubeError, UnavailableError
from streamrl_operator.kube.kinds import Kind
from streamrl_operator.kube.sight import LONGEST_PAUSE_S as LONGEST_REFUSED_S
from streamrl_operator.kube.sight import Sight
from streamrl_operator.kube.store import Key, Store

log = logging.getLogger(__name__)

WATCH_S = (240.0, 480.0)
"""A watch ends after a time drawn from here, so that not all of them begin again at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 15.0
"""Between two attempts: doubles from the first to the longest, each drawn from its upper half."""


@dataclass(slots=True, kw_only=True)
class Reflector:
    """Fills one store from one kind in one namespace (empty: all)."""

    client: Client
    kind: Kind
    store: Store
    sight: Sight
    """Told when the store holds all there is."""
    namespace: str = ""
    labels: str = ""
    _version: str = ""
    """Of the API server: where the next watch goes on; empty: list first."""
    _failures: int = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except ExpiredError:
                self._version = ""
            except KubeError as error:
                self._failures += 1
                # A connection that broke goes on from where it was; after any other error we no longer know where that is.
                if not isinstance(error, UnavailableError) or error.status not in (0, 200):
                    self._version = ""
                await self._pause(error)

    async def _pause(self, error: KubeError) -> None:
        longest_s = LONGEST_PAUSE_S
        if self.sight.is_refused(self.namespace, self.kind, error):
            longest_s = LONGEST_REFUSED_S
        else:
            extra = {"kind": self.kind.kind, "error": str(error), "failures": self._failures}
            log.warning("watch failed", extra=extra)
        await asyncio.sleep(pause_s(self._failures, asked_s=error.retry_after_s, longest_s=longest_s))

    async def _list(self) -> None:
        self._version = await refill(
            self.store, client=self.client, kind=self.kind, namespace=self.namespace, labels=self.labels
        )
        self.sight.listed(self.namespace, self.kind)

    async def _watch(self) -> None:
        """Follow the changes until the watch has had its time."""
        duration_s = random.uniform(*WATCH_S)
        events = self.client.watch(
            self.kind, version=self._version, duration_s=duration_s, namespace=self.namespace, labels=self.labels
        )
        async for event, obj in events:
            if event in ("ADDED", "MODIFIED"):
                self.store.put(obj)
            elif event == "DELETED":
                self.store.remove(obj)
            self._version, self._failures = obj["metadata"]["resourceVersion"], 0


async def refill(store: Store, *, client: Client, kind: Kind, namespace: str = "", labels: str = "") -> str:
    """List, and make the store equal to it; the version from which a watch goes on."""
    listed: set[Key] = set()
    version = ""
    async for page in client.list(kind, namespace=namespace, labels=labels):
        listed |= {store.put(obj) for obj in page.items}
        version = page.version
    store.keep(listed, version=int(version), namespace=namespace)
    return version


def pause_s(
    failures: int, *, asked_s: float | None = None, longest_s: float = LONGEST_PAUSE_S, drawn: float | None = None
) -> float:
    """How long to wait after so many failures in a row; `drawn` from 0 to 1, at random if absent."""
    bound_s = min(longest_s, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 16))
    share = 0.5 + 0.5 * (random.random() if drawn is None else drawn)
    return max(bound_s * share, asked_s or 0.0)
