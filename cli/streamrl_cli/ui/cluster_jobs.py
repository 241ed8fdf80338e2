"""The jobs of a cluster for pages: asked for once in some seconds, however many browsers look.

Owns: how long an answer counts, how much of it is kept. Does not own: requests (`cluster/api.py`), pages (`job_pages.py`).

    threads of pages  --jobs, detail: wait-->  the loop  --one request at a time for each thing-->  API server  -->  a scheduler
                      --latest: do not wait->

Invariants:
- Of each thing one request is under way, and the next is `_FRESH_S` after the last began, whatever became of it.
- Every answer is there after `_ANSWER_S`: what could not be read is a line in `faults`.
- What is not in the list of jobs is not asked for, so nobody makes requests with names of his own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from time import monotonic
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from streamrl import names
from streamrl.errors import UserError, UserErrors
from streamrl_cli.cluster.api import ApiClient, Object
from streamrl_cli.cluster.jobs import ENDED, EVENT, about, state
from streamrl_cli.ui.state import RunCurves, RunStatus, checked_curves, checked_status
from streamrl_operator.kube.kinds import GENERATOR_POOL, RLJOB, Kind
from streamrl_operator.planning.values import trainer_cluster

JobKey = tuple[str, str]
"""Namespace and name."""
_FRESH_S = 4.0
_PATIENCE_S, _OLD_S = 1.0, 60.0
"""A page waits so long for a newer answer where it has one that is not older than this: one silent scheduler holds up no other page."""
_ANSWER_S = 12.0
"""More than one request of the API server's answers takes; a scheduler has less."""
_MOST_OBJECTS = 500
"""Jobs; of one job, events or pools."""
_MOST_WAIT_S = 30.0
"""Of a page's thread; where the loop is alive, an answer is there before."""
_NAMESPACES_PER_S = 10
"""Where many are watched, the list is asked for less often."""
_AT_A_TIME = 8
"""Requests."""
_MOST_DETAILS = 64
"""Jobs whose details are kept: as many as there are open pages."""
_MOST_MESSAGE_CHARS = 2000
_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
_STATUS = (
    "step",
    "reward",
    "queue",
    "tokensPerSecond",
    "bubbles",
    "cost",
    "attempt",
    "restarts",
    "ignoredRestarts",
    "checkpointPath",
    "pools",
    "clusters",
    "completionTime",
)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """The jobs of all namespaces that are watched."""

    jobs: tuple[Object, ...] = ()
    """As far as pages need them."""
    faults: tuple[str, ...] = ()
    is_cut: bool = False
    """There are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """What is known of a job beside its object."""

    pools: tuple[Object, ...] = ()
    events: tuple[Object, ...] = ()
    status: RunStatus | None = None
    """What the scheduler says; None: it is not reached, or says nothing that can be believed."""
    curves: RunCurves | None = None
    """The same, of the run's course."""
    faults: tuple[str, ...] = ()


class _Question(Generic[_T]):
    """One thing that is asked for again and again. All of it in the loop, but `latest`."""

    def __init__(
        self, ask: Callable[[], Awaitable[_T]], *, clock: Callable[[], float], every_s: float = _FRESH_S
    ) -> None:
        self.latest: _T | None = None
        self._ask, self._clock, self._every_s = ask, clock, every_s
        self._task: asyncio.Task[_T] | None = None
        self._asked_s = self._answered_s = 0.0

    def renew(self) -> "asyncio.Task[_T]":
        """The request that is under way, or the last one while it counts, or a new one."""
        if self._task is None or (self._task.done() and self._clock() - self._asked_s >= self._every_s):
            self._asked_s = self._clock()
            self._task = asyncio.create_task(self._remembered(), name="question of a page")
        return self._task

    async def answer(self) -> _T:
        """The newest answer; where the next one is late, the last one while it is young."""
        task = self.renew()
        if self.latest is not None and self._clock() - self._answered_s < _OLD_S:
            await asyncio.wait([task], timeout=_PATIENCE_S)
            return self.latest
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _remembered(self) -> _T:
        self.latest = answer = await self._ask()
        self._answered_s = self._clock()
        return answer


class ClusterJobs:
    """Jobs of some namespaces, read."""

    def __init__(
        self,
        cluster: ApiClient,
        *,
        namespaces: Sequence[str],
        members: Mapping[str, ApiClient] = MappingProxyType({}),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """In the loop that `cluster` is of. `namespaces`: one that is empty stands for all. `clock`: monotonic seconds.
        `members`: by name, the clusters whose schedulers are asked too.
        """
        self._members = members
        self._cluster, self._namespaces, self._clock = cluster, tuple(dict.fromkeys(namespaces)), clock
        self._loop = asyncio.get_running_loop()
        self._turns = asyncio.Semaphore(_AT_A_TIME)
        every_s = max(_FRESH_S, len(self._namespaces) / _NAMESPACES_PER_S)
        self._list = _Question(self._ask_jobs, every_s=every_s, clock=clock)
        self._details: dict[JobKey, _Question[JobDetail]] = {}

    # ---- called in threads

    def jobs(self) -> JobList:
        """All jobs, as of some seconds ago at most. Raises `UserError`: nothing answers."""
        return self._waited(self._list.answer())

    def job(self, key: JobKey) -> Object:
        """One of them. Raises `UserError`: there is none."""
        found = _by_key(self.jobs(), key)
        if found is None:
            raise UserError(field="/".join(key), rule="is not a job of the namespaces that are shown")
        return found

    def detail(self, key: JobKey) -> JobDetail:
        """What else is known of a job. Raises `UserError`: nothing answers."""
        return self._waited(self._answer(key))

    def latest(self) -> JobList | None:
        """The last list, without waiting for the next, which is asked for; None: there is none yet."""
        self._loop.call_soon_threadsafe(self._list.renew)
        return self._list.latest

    def latest_job(self, key: JobKey) -> Object | None:
        """A job, as `latest` gives the list."""
        found = self.latest()
        return None if found is None else _by_key(found, key)

    def _waited(self, answer: Coroutine[Any, Any, _T]) -> _T:
        try:
            return asyncio.run_coroutine_threadsafe(answer, self._loop).result(_MOST_WAIT_S)
        except TimeoutError:
            raise UserError(field="the API server", rule="gives no answer in time", fix="look again later") from None

    # ---- in the loop

    async def close(self) -> None:
        """Ask no more."""
        await asyncio.gather(self._list.close(), *(question.close() for question in self._details.values()))

    async def _answer(self, key: JobKey) -> JobDetail:
        return await self._question(key).answer()

    def _question(self, key: JobKey) -> _Question[JobDetail]:
        found = self._details.pop(key, None) or _Question(lambda: self._ask_detail(key), clock=self._clock)
        self._details[key] = found  # the last one that was looked at comes last
        if len(self._details) > _MOST_DETAILS:
            del self._details[next(iter(self._details))]
        return found

    async def _ask_jobs(self) -> JobList:
        clusters = map(self._cluster.within, self._namespaces)
        found = await asyncio.gather(*(self._some(RLJOB, cluster=cluster) for cluster in clusters))
        jobs = sorted((job for some, _ in found for job in some), key=_made, reverse=True)
        faults = tuple(line for _, lines in found for line in lines)
        return JobList(jobs=tuple(jobs[:_MOST_OBJECTS]), faults=faults, is_cut=len(jobs) > _MOST_OBJECTS)

    async def _ask_detail(self, key: JobKey) -> JobDetail:
        job = _by_key(self._list.latest or JobList(), key)
        if job is None:
            return JobDetail()
        namespace, name = key
        cluster = self._cluster.within(namespace)
        (pools, no_pools), (events, no_events), (status, curves) = await asyncio.gather(
            self._some(GENERATOR_POOL, cluster=cluster, labels=f"{names.LABEL_JOB}={name}"),
            self._some(EVENT, cluster=cluster, fields=about(job)),
            self._said(job),
        )
        faults = (*no_pools, *no_events)
        return JobDetail(pools=tuple(pools), events=tuple(events), status=status, curves=curves, faults=faults)

    async def _some(
        self, kind: Kind, *, cluster: ApiClient, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], tuple[str, ...]]:
        """The first objects, a few more than `_MOST_OBJECTS` where there are more, and what went wrong."""
        found: list[Object] = []
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                self._turns,
                aclosing(cluster.pages(kind, labels=labels, fields=fields)) as pages,
            ):
                async for page in pages:
                    found += map(_kept, page) if kind is RLJOB else page
                    if len(found) > _MOST_OBJECTS:
                        break
        except (UserError, UserErrors) as error:
            return found, tuple(error.lines)
        except TimeoutError:
            return found, (f"{kind.plural}: the API server gave no whole answer in {_ANSWER_S:.0f} s",)
        return found, ()

    async def _said(self, job: Object) -> tuple[RunStatus | None, RunCurves | None]:
        """By the scheduler."""
        cluster = self._scheduler_cluster(job)
        if cluster is None or state(job) in ENDED:
            return None, None
        pod = f"{names.trainer(job['metadata']['name'])}-0"
        status = checked_status(await cluster.page(pod, port=names.PORT_SIGNALS))
        if status is None:
            return None, None
        return status, checked_curves(await cluster.page(pod, port=names.PORT_SIGNALS, path="curves"))

    def _scheduler_cluster(self, job: Object) -> ApiClient | None:
        """Where the scheduler's pod is; None: in a member that is not asked, or not known yet."""
        name = trainer_cluster(job)
        if not name:
            return self._cluster.within(job["metadata"]["namespace"])
        there = next((one for one in job["status"].get("clusters", ()) if one["name"] == name), None)
        return None if there is None or name not in self._members else self._members[name].within(there["namespace"])


def _by_key(found: JobList, key: JobKey) -> Object | None:
    return next((job for job in found.jobs if key_of(job) == key), None)


def _made(job: Object) -> str:
    return str(job["metadata"].get("creationTimestamp"))


def key_of(job: Object) -> JobKey:
    """Where a job is."""
    return job["metadata"]["namespace"], job["metadata"]["name"]


def _kept(job: Object) -> Object:
    """What pages show of a job: a specification may have megabytes."""
    spec, status = job["spec"], job.get("status") or {}
    conditions = [
        one | {"message": str(one["message"])[:_MOST_MESSAGE_CHARS]} for one in status.get("conditions") or ()
    ]
    return {
        "metadata": {key: job["metadata"][key] for key in _METADATA if key in job["metadata"]},
        "spec": {
            "suspend": spec.get("suspend", False),
            "pipeline": {"steps": spec["pipeline"]["steps"]},
            "generators": [
                {key: pool[key] for key in ("name", "clusterName") if key in pool}
                for pool in spec.get("generators") or ()
            ],
            "trainer": {key: value for key, value in spec.get("trainer", {}).items() if key == "clusterName"},
            "failurePolicy": {"maxRestarts": spec.get("failurePolicy", {}).get("maxRestarts")},
        },
        "status": {key: status[key] for key in _STATUS if key in status} | {"conditions": conditions},
    }
