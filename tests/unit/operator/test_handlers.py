"""Looks at many jobs at once: which of them may keep the others waiting."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from streamrl_operator.handlers import WORKERS, Handlers
from streamrl_operator.kube.store import Key
from streamrl_operator.metrics import Metrics
from streamrl_operator.work import Hands, WorkQueue

SILENT = [("lab", f"silent-{number}") for number in range(3 * WORKERS)]
OTHER = ("lab", "other")


class Whole:
    """Caches are whole, as a call and as an event."""

    async def __call__(self) -> None:
        return None

    async def wait(self) -> None:
        return None


@dataclass
class Jobs:
    """Caches that are whole, and looks: those at silent jobs wait for a pod, for ever or until `answers`."""

    hands: Hands
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    waits: set[Key] = field(default_factory=set)
    looked: list[Key] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def reconcile(self, key: Key) -> None:
        with self._counted():
            if key in SILENT:
                self.waits.add(key)
                await self._pod()
            await asyncio.sleep(0)
            self.looked.append(key)

    async def _pod(self) -> None:
        self.at_once -= 1
        async with self.hands.aside():
            await self.answers.wait()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        yield
        self.at_once -= 1

    async def follow(self) -> None:
        await asyncio.Event().wait()

    async def run(self) -> None:
        await asyncio.Event().wait()

    @property
    def synced(self) -> "Whole":
        return Whole()

    def counts(self) -> dict[str, int]:
        return {}

    def jobs(self) -> list[Key]:
        return SILENT

    def known(self, *_: object) -> dict[str, Any]:
        return {}


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(hands=Hands(WORKERS))


async def until(check: Any, *, deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not check():  # noqa: ASYNC110 - a poll with a deadline: what is awaited sets no event
            await asyncio.sleep(0.01)


async def test_jobs_whose_pods_keep_silent_keep_no_other_waiting(jobs: Jobs) -> None:
    queue = WorkQueue(clock=time.monotonic)
    one = cast(Any, jobs)
    running = asyncio.ensure_future(
        Handlers(cluster=one, jobs=one, reconciler=one, queue=queue, hands=jobs.hands, metrics=Metrics()).run()
    )
    await until(lambda: jobs.waits == set(SILENT))
    queue.add(OTHER)
    await until(lambda: jobs.looked == [OTHER])
    jobs.answers.set()
    await until(lambda: set(jobs.looked) == {*SILENT, OTHER})
    assert jobs.most_at_once <= WORKERS
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
