"""Looks at many jobs at once: which of them may keep the others waiting."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from streamrl_operator.handlers import WORKERS, Handlers
from streamrl_operator.kube.errors import ConflictError, KubeError, UnavailableError
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.kube.sight import Sight
from streamrl_operator.kube.store import Key
from streamrl_operator.metrics import Metrics
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.reconcile import Looked
from streamrl_operator.work import Hands, WorkQueue

SILENT = [("lab", f"silent-{number}") for number in range(3 * WORKERS)]
OTHER = ("lab", "other")


@dataclass
class Jobs:
    """What there is, and looks: those at silent jobs wait for a pod, for ever or until `answers`."""

    hands: Hands
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    waits: set[Key] = field(default_factory=set)
    looked: list[Key] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    sight: Sight = field(default_factory=lambda: Sight(("lab", "refused"), (RLJOB,)))

    fails: list[KubeError] = field(default_factory=list)
    """What looks at the other job fail with, one after the other."""
    said: list[tuple[int, Aspect]] = field(default_factory=list)
    """(failures that were left, what was told of the job)."""

    async def say(self, _: Key, told: Aspect) -> None:
        self.said.append((len(self.fails), told))
        raise failure(503)

    async def reconcile(self, key: Key) -> Looked:
        if key == OTHER and self.fails:
            raise self.fails.pop(0)
        with self._counted():
            if key in SILENT:
                self.waits.add(key)
                await self._pod()
            await asyncio.sleep(0)
            self.looked.append(key)
        return Looked()

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

    def known(self, *_: object) -> dict[str, Any]:
        return {}


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(hands=Hands(WORKERS))


async def until(check: Any, *, deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not check():  # noqa: ASYNC110 - a poll with a deadline: what is awaited sets no event
            await asyncio.sleep(0.01)


def failure(status: int) -> KubeError:
    """An answer with that status; 0: none."""
    kind = UnavailableError if status in (0, 429) or status >= 500 else ConflictError
    return kind("apply /x", status=status, reason="InternalError", message="failed calling webhook")


@asynccontextmanager
async def working(jobs: Jobs) -> AsyncIterator[WorkQueue]:
    """Handlers at work; what they are to look at goes into the queue."""
    queue = WorkQueue(clock=time.monotonic)
    one = cast(Any, jobs)
    running = asyncio.ensure_future(
        Handlers(cluster=one, jobs=one, reconciler=one, queue=queue, hands=jobs.hands, metrics=Metrics()).run()
    )
    try:
        yield queue
    finally:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([500] * 3, []),
        ([500] * 4, [0]),
        ([409, 0, 500, 500], [0]),
        ([0] * 4, []),
        ([429] * 4, []),
    ],
    ids=["passes", "lasts", "with others", "no answer", "too many requests"],
)
async def test_a_server_that_fails_for_long_is_told_of(jobs: Jobs, statuses: list[int], said: list[int]) -> None:
    jobs.fails = [failure(status) for status in statuses]
    jobs.sight.listed("lab", RLJOB)
    async with working(jobs) as queue:
        queue.add(OTHER)
        await until(lambda: OTHER in jobs.looked)
    assert [left for left, _ in jobs.said] == said
    for _, told in jobs.said:
        assert (told.reason, told.holds) == ("ServerError", False)
        assert "failed calling webhook" in told.message


async def test_jobs_whose_pods_keep_silent_keep_no_other_waiting(jobs: Jobs) -> None:
    jobs.sight.listed("lab", RLJOB)
    async with working(jobs) as queue:
        for key in SILENT:
            queue.add(key)
        await until(lambda: jobs.waits == set(SILENT))
        queue.add(OTHER)
        await until(lambda: jobs.looked == [OTHER])
        jobs.answers.set()
        await until(lambda: set(jobs.looked) == {*SILENT, OTHER})
        assert jobs.most_at_once <= WORKERS


async def test_only_jobs_of_namespaces_that_are_known_are_looked_at(jobs: Jobs) -> None:
    jobs.sight.listed("lab", RLJOB)
    async with working(jobs) as queue:
        for number in range(2 * WORKERS):
            queue.add(("refused", f"job-{number}"))
        queue.add(OTHER)
        await until(lambda: jobs.looked == [OTHER])
        jobs.sight.listed("refused", RLJOB)
        queue.add(("refused", "job-0"))
        await until(lambda: jobs.looked == [OTHER, ("refused", "job-0")])
