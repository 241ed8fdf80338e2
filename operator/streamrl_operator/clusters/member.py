"""One member cluster: its connection, its caches, and what is written there. Nothing that happens there raises out of here.

    Secret ─▶ connect ─▶ ask for its UID ─▶ caches, workers, a question each PROBE_S     any end: a pause, then from the beginning
                                                  └── three unanswered ─▶ unreachable: nothing is written, all stays as it was known

    reconcile of the job ──want(work)──▶ WorkQueue ──▶ a free worker: anchor, objects, what is no longer wanted
    caches there ──changed──▶ WorkQueue, and the job's reconcile at home

Owns: when the member counts as reached, what is known of it, and that an anchor whose job is gone at home is removed with all that it owns.
Does not own: what is to be there (`planning/objects/members.py`), RLClusters and their status (`registry.py`).
Waits for: the member's API server; unblocked by its answer, the deadline of each request, or cancellation.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from streamrl import names
from streamrl.clusters import RLClusterSpec
from streamrl.errors import UserError
from streamrl_operator import apply
from streamrl_operator.apply import Ownership
from streamrl_operator.clock import OperatorClock
from streamrl_operator.kube import kubeconfig
from streamrl_operator.kube.answers import KubeError, RequestRefusedError
from streamrl_operator.kube.cache import Key, pause_s
from streamrl_operator.kube.client import Client, Count
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import CLAIM, CONFIG_MAP, IN_MEMBERS, NAMESPACE, POD, SERVICE, Kind
from streamrl_operator.planning import pods
from streamrl_operator.planning.objects.members import owned_by
from streamrl_operator.planning.values import Object
from streamrl_operator.start_check import StartCheck
from streamrl_operator.work_queue import WorkQueue

log = logging.getLogger(__name__)

PROBE_S = 5.0
"""Between two questions whether the member is there, and who it is."""
FAILURES = 3
"""Unanswered in a row, after which it counts as unreachable."""
REQUEST_TIMEOUT_S = 10.0
"""Of each request there. A link that is slow has round trips of a second; the rest is a server that is not well."""
SWEEP_S = 600.0
"""Between two looks at all anchors and at what we may do."""
LONGEST_PAUSE_S = 30.0
"""Between two attempts to connect."""
WORKERS = 4
"""Jobs that are brought about there at once."""
_SYSTEM = "kube-system"
_MOST_UID_CHARACTERS = 64
"""As a status takes; a UID has 36, and a member may say what it likes."""
_VERBS = ("list", "watch", "create", "patch", "delete")
_POD_VERBS = ("list", "watch", "delete")

Action = Literal["Apply", "Stop", "Remove"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberWork:
    """What is to be there of one job."""

    action: Action
    uid: str
    """Of the job."""
    generation: int | None = None
    """Of the job, that the objects are of."""
    anchor: Object | None = None
    objects: Sequence[Object] = ()
    kept: frozenset[str] = frozenset()
    """Names of claims that outlive the job: the anchor does not own them."""
    delete_pods: frozenset[str] = frozenset()
    """By UID: pods that are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberState:
    """What is said of the member."""

    connected: bool = False
    reason: str = "Connecting"
    message: str = "it was not reached yet"
    authorized: bool | None = None
    lacking: str = ""
    """The first of what we may not do there."""
    uid: str = ""
    """Of the cluster; stays while it is unreachable."""
    contact: datetime | None = None


@dataclass(slots=True, kw_only=True)
class Member:
    """The operator's work in one member cluster."""

    name: str
    spec: RLClusterSpec
    origin: str
    """UID of the home cluster."""
    kubeconfig: Callable[[], Awaitable[str]]
    """Reads it. Raises KubeError, UserError."""
    told: Callable[[Key], None]
    """Called with a job (of home) of which something has changed here."""
    tell_all: Callable[[], None]
    """Called when what is known here of all jobs may have changed."""
    is_gone: Callable[[Key, str], bool]
    """Whether a job (of home) with this UID certainly is not there any more."""
    clock: OperatorClock
    count: Count = lambda *_: None
    state: MemberState = field(default_factory=MemberState)
    cluster: CachedCluster | None = None
    """The caches; while the member is unreachable, as it was last."""
    _followed: CachedCluster | None = None
    """Of the present connection."""
    _work: dict[Key, MemberWork] = field(default_factory=dict)
    _refused: dict[Key, str] = field(default_factory=dict)
    _made: dict[Key, MemberWork] = field(default_factory=dict)
    _queue: WorkQueue = field(init=False)
    _failures: int = 0

    def __post_init__(self) -> None:
        self._queue = WorkQueue(clock=self.clock.monotonic)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What is made here: only a trainer has volumes."""
        return (*IN_MEMBERS, *([] if self.spec.trainers is None else [CLAIM]))

    # ---- What the reconciles at home ask.

    def unreachable(self, namespace: str) -> str:
        """Why nothing newer is known of a namespace here; empty: all is known."""
        if not self.state.connected:
            return self.state.message
        is_newest = self.cluster is not None and self.cluster is self._followed
        if self.cluster is None or not is_newest or not self.cluster.cache_sync.is_whole(namespace):
            return f"namespace {namespace} there cannot be listed (yet)"
        return ""

    def objects(self, kind: Kind, key: Key, *, failed: bool = False) -> list[dict[str, Any]]:
        """Those of a job of home, as they were known last. `failed`: as of `CachedCluster.of_job`."""
        there = self._there(key)
        return [] if there is None or self.cluster is None else self.cluster.of_job(kind, there, failed=failed)

    def known(self, kind: Kind, key: Key, name: str) -> dict[str, Any] | None:
        """One object of a job of home."""
        there = self._there(key)
        return None if there is None or self.cluster is None else self.cluster.known(kind, there[0], name)

    def is_clean(self, key: Key, uid: str) -> bool:
        """Whether nothing of a job is here, as far as is known, but claims that it has left."""
        found = [obj for kind in (*self.kinds, POD) if kind is not CLAIM for obj in self.objects(kind, key)]
        found += [claim for claim in self.objects(CLAIM, key) if claim["metadata"].get("ownerReferences")]
        return not any(pods.label(obj, names.LABEL_JOB_UID) == uid for obj in found)

    def reached(self, key: Key) -> tuple[CachedCluster, Key] | None:
        """The caches, and the job of home as they know it; None while nothing newer is known."""
        there = self._there(key)
        if there is None or self.cluster is None or self.unreachable(there[0]):
            return None
        return self.cluster, there

    def refused(self, key: Key) -> str:
        """What its API server refused last of a job; empty: nothing."""
        return self._refused.get(key, "")

    def made_generation(self, key: Key, uid: str) -> int | None:
        """Return the generation of a job of which everything is here, as far as was asked for; None: of none yet."""
        made = self._made.get(key)
        return made.generation if made is not None and made.uid == uid else None

    def want(self, key: Key, work: MemberWork) -> None:
        """What is to be here of a job of home, from now on."""
        before = self._work.get(key)
        if before is not None and before.delete_pods:  # they are named once, and may not have been deleted yet
            there = {pods.uid(pod) for pod in self.objects(POD, key)}
            work = replace(work, delete_pods=work.delete_pods | (before.delete_pods & there))
        if before != work:
            self._work[key] = work
            self._queue.add_after(key, 0.0)

    def forget(self, key: Key) -> None:
        """The job is gone at home; what is left of it here is swept."""
        if self._work.pop(key, None) is not None:
            self._queue.add_after(key, 0.0)
        self._refused.pop(key, None)
        self._made.pop(key, None)
        self._queue.forget(key)

    def _there(self, key: Key) -> Key | None:
        namespace = self.spec.namespace_of(key[0])
        return None if namespace is None else (namespace, key[1])

    def _home(self, there: Key) -> Key | None:
        return next(((one.hub, there[1]) for one in self.spec.namespaces if one.member == there[0]), None)

    # ---- The connection.

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            try:
                await self._session()
                failures = 0
            except UserError as error:
                self._lose("KubeconfigRefused", str(error))
            except KubeError as error:
                self._lose("Unauthorized" if error.status == _UNAUTHORIZED else "Unreachable", str(error))
            except Exception as error:
                log.exception("member failed", extra={"cluster": self.name})
                self._lose("Internal", type(error).__name__)
            failures += 1
            await asyncio.sleep(pause_s(failures, longest_s=LONGEST_PAUSE_S))

    def _lose(self, reason: str, message: str) -> None:
        was = self.state
        if was.connected or (was.reason, was.message) != (reason, message):
            log.warning("member is lost", extra={"cluster": self.name, "reason": reason, "error": message})
        self.state = replace(was, connected=False, reason=reason, message=message)
        if was.connected:
            self._tell_all()

    async def _session(self) -> None:
        """From a connection to its end."""
        text = await self.kubeconfig()
        access = kubeconfig.of_member(text, source=f"the kubeconfig of RLCluster {self.name}")
        async with Client(access, count=self.count, timeout_s=REQUEST_TIMEOUT_S) as client:
            uid = await self._ask_uid(client)
            if uid == self.origin:
                raise UserError(
                    field=f"RLCluster {self.name}",
                    rule="is the home cluster itself",
                    fix="leave out clusterName of pools at home",
                )
            if uid != self.state.uid:
                self.cluster = None  # what was known, and what was wanted, is of another cluster
                self._work.clear()
                self._refused.clear()
                self._made.clear()
                self.state = replace(self.state, uid=uid)
            namespaces = tuple(sorted(one.member for one in self.spec.namespaces))
            cluster = CachedCluster(
                client,
                self._changed,
                namespaces=namespaces,
                kinds=(*self.kinds, POD),
                reported=lambda _namespace, _is_whole: self._take(cluster),
            )
            self._followed = cluster
            async with asyncio.TaskGroup() as tasks:
                work = [tasks.create_task(cluster.follow(), name=f"follow {self.name}")]
                work += [tasks.create_task(self._serve(cluster), name=f"work in {self.name}") for _ in range(WORKERS)]
                try:
                    await self._watch_over(client, text=text, uid=uid)
                finally:
                    self._followed = None  # its connection ends here, and nobody may ask over it
                    for each in work:
                        each.cancel()

    def _take(self, cluster: CachedCluster) -> None:
        """Its caches are as whole as they are."""
        if self.cluster is None or any(cluster.cache_sync.is_whole(one.member) for one in self.spec.namespaces):
            self.cluster = cluster
        self._tell_all()

    def _tell_all(self) -> None:
        """Every job is looked at, here and at home: one may wait for this member that has nothing here yet."""
        there = set() if self.cluster is None else self.cluster.jobs()
        for key in {*self._work, *filter(None, map(self._home, there))}:
            self._queue.add_after(key, 0.0)
        self.tell_all()

    async def _watch_over(self, client: Client, *, text: str, uid: str) -> None:
        """Until the credentials or the cluster are other ones.

        Raises:
            KubeError: it does not know us any more.
        """
        swept_s = float("-inf")
        while True:
            try:
                found = await self._ask_uid(client)
                if self.clock.monotonic() - swept_s >= SWEEP_S:
                    await self._authorize(client)
                    swept_s = self.clock.monotonic()
                    self._tell_all()
            except KubeError as error:
                self._failures += 1
                if error.status == _UNAUTHORIZED or self._failures >= FAILURES:
                    self._lose("Unauthorized" if error.status == _UNAUTHORIZED else "Unreachable", str(error))
            else:
                self._reached()
                if found != uid:
                    return
            if await self._is_renewed(text):
                return
            await asyncio.sleep(PROBE_S)

    def _reached(self) -> None:
        self._failures = 0
        was = self.state
        self.state = replace(was, connected=True, reason="Connected", message="", contact=self.clock.now())
        if not was.connected:
            log.info("member is reached", extra={"cluster": self.name, "uid": was.uid})
            self._tell_all()

    async def _is_renewed(self, text: str) -> bool:
        """Whether the Secret has another kubeconfig by now. A home that does not answer says nothing of the member."""
        try:
            return await self.kubeconfig() != text
        except KubeError:
            return False
        except UserError:
            return True

    async def _ask_uid(self, client: Client) -> str:
        found = await client.get(NAMESPACE, namespace="", name=_SYSTEM)
        return str(found["metadata"]["uid"])[:_MOST_UID_CHARACTERS]

    async def _authorize(self, client: Client) -> None:
        """Ask for each right that the work here needs.

        Raises:
            KubeError: the first question that had no answer; the others are not waited for.
        """
        asked = [(kind, verb, "") for kind in self.kinds for verb in _VERBS]
        asked += [(POD, verb, "") for verb in _POD_VERBS]
        asked += [] if self.spec.trainers is None else [(SERVICE, "get", "proxy")]  # a scheduler's numbers
        rights = [(one.member, *right) for one in self.spec.namespaces for right in asked]
        failed: list[BaseException] = []
        may: dict[str, asyncio.Task[bool]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                for namespace, kind, verb, part in rights:
                    right = f"{verb} {kind.plural}{part and '/'}{part} in namespace {namespace}"
                    question = client.may(kind, verb=verb, namespace=namespace, subresource=part)
                    may[right] = tasks.create_task(question, name=f"may {right}")
        except* KubeError as errors:
            failed.extend(errors.exceptions)
        if failed:  # behind `except*`, in which Python before 3.11.4 wraps what is raised into a group
            raise failed[0]
        lacking = next((right for right, answer in may.items() if not answer.result()), "")
        self.state = replace(self.state, authorized=not lacking, lacking=lacking)

    # ---- The work.

    def _changed(self, there: Key, is_asked: bool) -> None:  # noqa: FBT001 - as a store calls it
        key = self._home(there)
        if key is not None:
            self._queue.add(key, is_asked)
            self.told(key)

    async def _serve(self, cluster: CachedCluster) -> None:
        """One job after another, until cancelled."""
        while True:
            key = await self._queue.get()
            there = self._there(key)
            if there is None or self.unreachable(there[0]) or self.cluster is not cluster:
                self._queue.done(key, requeue_after_s=None)  # all are due again when it is reached
                continue
            await self._work_on(cluster, key, there)

    async def _work_on(self, cluster: CachedCluster, key: Key, there: Key) -> None:
        extra = {"cluster": self.name, "namespace": key[0], "job": key[1]}
        work = self._work.get(key)
        try:
            refused = await self._bring_about(cluster, key, there, work)
        except (NameTakenError, RequestRefusedError) as error:
            refused = [error]
        except KubeError as error:
            wait_s = self._queue.failed(key, asked_s=error.retry_after_s)
            log.warning("member's part failed", extra={**extra, "error": str(error), "again_s": round(wait_s, 2)})
            return
        except asyncio.CancelledError:
            self._queue.done(key, requeue_after_s=0.0)  # the session has ended, and the queue outlives it
            raise
        except Exception as error:
            log.exception("member's part failed", extra=extra)
            self._say_refused(key, f"{type(error).__name__}")
            self._queue.failed(key)
            return
        self._say_refused(key, str(refused[0]) if refused else "")
        if refused:
            self._queue.failed(key)
            return
        self._queue.done(key, requeue_after_s=None)
        self._report_made(key, work)

    def _report_made(self, key: Key, work: MemberWork | None) -> None:
        """Wake the reconcile at home if the job may wait for this: the first time of each generation."""
        if work is None or work is not self._work.get(key):
            return
        was, self._made[key] = self._made.get(key), work
        if was is None or (was.uid, was.generation) != (work.uid, work.generation):
            self.told(key)

    def _say_refused(self, key: Key, message: str) -> None:
        if self._refused.get(key, "") != message:
            self._refused[key] = message
            self.told(key)

    async def _bring_about(
        self, cluster: CachedCluster, key: Key, there: Key, work: MemberWork | None
    ) -> Sequence[Exception]:
        """What was refused."""
        anchor = cluster.known(CONFIG_MAP, there[0], names.anchor(there[1]))
        if anchor is not None and self._is_stray(key, anchor, work):
            await self._remove(cluster, anchor, there)
            return ()
        if work is None:
            return ()
        if work.action == "Apply":
            return await self._apply(cluster, there, work)
        if anchor is None or pods.label(anchor, names.LABEL_JOB_UID) != work.uid:
            return ()
        if work.action == "Remove":
            await apply.keep(cluster, work.kept, owner=_ownership(anchor, there))
            await self._remove(cluster, anchor, there)
            return ()
        return await apply.stop(cluster, owner=_ownership(anchor, there))

    def _is_stray(self, key: Key, anchor: Mapping[str, Any], work: MemberWork | None) -> bool:
        """Whether it is ours, of a job that is gone."""
        uid = pods.label(anchor, names.LABEL_JOB_UID)
        is_ours = pods.label(anchor, names.LABEL_ORIGIN) == self.origin
        is_its_own = pods.label(anchor, names.LABEL_HUB_NAMESPACE) == key[0]
        return is_ours and is_its_own and (work is None or work.uid != uid) and self.is_gone(key, uid)

    async def _apply(self, cluster: CachedCluster, there: Key, work: MemberWork) -> Sequence[Exception]:
        assert work.anchor is not None, "what is applied has an owner"
        owner = _ownership(await cluster.find_or_make(work.anchor, owner_uid=work.uid), there)
        await apply.keep(cluster, work.kept, owner=owner)
        objects = [each if _is_kept(each, work) else owned_by(owner.uid, each) for each in work.objects]
        check = StartCheck(cluster=cluster, owner_uid=owner.uid, is_home=False)
        refused = await apply.apply_objects(cluster, objects, owner=owner, check=check)
        refused += await apply.prune(cluster, objects, owner=owner)
        for pod in cluster.of_job(POD, there):
            if pods.uid(pod) in work.delete_pods:
                await apply.delete_once(cluster, pod)
        return refused

    async def _remove(self, cluster: CachedCluster, anchor: dict[str, Any], there: Key) -> None:
        """The next step; what goes brings us back."""
        if not await apply.remove(cluster, owner=_ownership(anchor, there)):
            await apply.delete_once(cluster, anchor)


def _is_kept(obj: Object, work: MemberWork) -> bool:
    return obj["kind"] == CLAIM.kind and obj["metadata"]["name"] in work.kept


def _ownership(anchor: Mapping[str, Any], there: Key) -> Ownership:
    return Ownership(namespace=there[0], job=there[1], uid=anchor["metadata"]["uid"])


_UNAUTHORIZED = 401
