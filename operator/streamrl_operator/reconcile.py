"""One reconcile of one job, and what follows from it. Level-triggered: nothing depends on what has happened, only on what is.

    1  the job as it is known; one of another controller is left alone. Of one at rest of which nothing has changed, the numbers alone
    2  the scheduler's numbers, if it is time (`observe.py`)
    3  our finalizer, before anything is made; of a job that is being deleted, the next step of that (`apply.py`)
    4  everything of the job (`observe.py`)
    5  what is to be done (`planning.life`, pure)
    6  certificates that are due (`certify.py`), then the objects, then what is no longer wanted, then pods that are to go (`apply.py`);
       each member cluster is told what is to be there (`clusters/wanted.py`)
    7  events; the pools' statuses; the job's status, once and last (an end of the job: before 6)

A reconcile that is interrupted anywhere is made good by the next one. An object that is refused holds up what needs it and nothing else; the
condition Ready says so until it is had.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from streamrl import names
from streamrl_operator import apply, events, tls_secrets
from streamrl_operator.certify import Certifier
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.registry import Members
from streamrl_operator.clusters.wanted import JobInMembers
from streamrl_operator.events import Events, Refusal
from streamrl_operator.kube.answers import RequestRefusedError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import (
    APPLIED,
    CLAIM,
    GENERATOR_POOL,
    RLJOB,
    STATEFUL_SET,
    WORKLOAD,
    of,
)
from streamrl_operator.metrics import OperatorMetrics
from streamrl_operator.observe import Memory, NamespaceDefaults, Rest, look_up, observe, read_at_rest, refresh
from streamrl_operator.planning import gang, job_status, members, pods, termination
from streamrl_operator.planning.certificates import Lives, roles_of
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.job_plan import plan_job
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import (
    JobDecision,
    JobEvent,
    Object,
    Observed,
    PlanningSettings,
)
from streamrl_operator.start_check import StartCheck

_US = "streamrl.io/operator"
"""`managedBy` of the jobs that this operator brings about."""
REFRESHES_PER_S = 10.0
"""Readings of numbers, of all running jobs together."""
PROGRESS_WRITES_PER_S = 3.0
"""Writes of progress, of all running jobs together. One takes some 35 ms of an API server's processor, which checks all rules of the spec each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """After a reconcile."""

    again_s: float | None = None
    """Until the next; None: when something changes."""
    refused: str = ""
    """Why not all of it could be brought about, in a word; empty: it could."""


@dataclass(slots=True, kw_only=True)
class Reconciler:
    """Brings jobs about."""

    cluster: CachedCluster
    events: Events
    settings: PlanningSettings
    lives: Lives
    clock: OperatorClock
    aside: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Entered while a reconcile waits for a pod (`controller.aside`)."""
    metrics: OperatorMetrics = field(default_factory=OperatorMetrics)
    members: Members | None = None
    """None: jobs have no pools in member clusters."""
    _memories: dict[Key, Memory] = field(default_factory=dict)
    _defaults: NamespaceDefaults = field(default_factory=NamespaceDefaults)
    _certifier: Certifier = field(init=False)

    def __post_init__(self) -> None:
        self._certifier = Certifier(
            home=self.cluster, members=self.members, lives=self.lives, clock=self.clock, metrics=self.metrics
        )

    async def reconcile(self, key: Key, *, has_changed: bool = True) -> ReconcileResult:
        """One reconcile of a job. `has_changed`: something of it has; else its time has come.

        Raises:
            KubeError: a request failed.
            NameTakenError: an object of that name is somebody else's, and the job cannot begin without it.
        """
        try:
            return await self._reconcile(key, has_changed=has_changed)
        except (NameTakenError, RequestRefusedError) as error:
            await self.say(key, events.refusal_condition([error]))
            raise

    async def say(self, key: Key, reported: Aspect, *, conditions: Sequence[Object] | None = None) -> None:
        """Tell what is in the way where people look, and nothing else. `conditions`: all others as they are now; None: they stay."""
        raw = self._ours(key)
        if raw is None:
            return
        await self._warn(raw, reported)
        stored = (raw.get("status") or {}) | ({} if conditions is None else {"conditions": conditions})
        status = termination.with_blocked_condition(raw, reported, status=stored, now=self.clock.now())
        self.metrics.job(key, status, clusters=members.clusters_by_pool(raw))
        await apply.write_status(self.cluster, raw, status)

    async def _reconcile(self, key: Key, *, has_changed: bool) -> ReconcileResult:
        memory = self._memories.get(key)
        if memory is not None and not has_changed:
            left_s = await read_at_rest(self.cluster, key, memory=memory, clock=self.clock, aside=self.aside)
            if left_s is not None:
                return ReconcileResult(again_s=min(left_s, self._times_s()[0]))
        raw = self._ours(key)
        if raw is None:
            return ReconcileResult()
        if memory is None or memory.uid != raw["metadata"]["uid"]:
            memory = self._memories[key] = Memory(uid=raw["metadata"]["uid"])
        if self.members is not None and not self.members.is_known and members.names_member(raw):
            return ReconcileResult(again_s=1.0)
        resync_s, progress_s = self._times_s()
        settings = replace(self.settings, resync_s=resync_s, progress_s=progress_s)
        await refresh(
            self.cluster,
            raw,
            memory=memory,
            clock=self.clock,
            settings=settings,
            aside=self.aside,
            members=self.members,
        )
        memory.rest = None
        raw = self._ours(key)  # a pod that keeps silent takes seconds
        if raw is None or raw["metadata"]["uid"] != memory.uid:
            return ReconcileResult(again_s=0.0)
        leaving = pods.is_leaving(raw)
        if not leaving and not apply.holds_finalizer(raw):
            raw = await apply.add_finalizer(self.cluster, raw)
        inherited = await self._defaults.inherited(
            self.cluster, raw, memory=memory, clock=self.clock, settings=settings
        )
        observed = observe(
            self.cluster,
            raw,
            memory=memory,
            clock=self.clock,
            settings=settings,
            inherited=inherited,
            members=self.members,
        )
        observed = await look_up(self.cluster, observed, memory=memory, members=self.members)
        decision = decide(observed, settings=settings)
        memory.scaling, memory.unreachable = decision.scaling, decision.unreachable
        if leaving:
            return await self._leave(observed, decision)
        return await self._perform(observed, decision, memory)

    def _times_s(self) -> tuple[float, float]:
        """Return the time between two readings of a job's numbers, and between two writes of its progress; both are longer where many jobs run."""
        running = sum(memory.asked_s is not None for memory in self._memories.values())
        resync_s = max(self.settings.resync_s, running / REFRESHES_PER_S)
        return resync_s, resync_s * max(1, math.ceil(running / PROGRESS_WRITES_PER_S / resync_s))

    def unreachable(self) -> int:
        """Jobs of which it is told that their numbers cannot be read."""
        return sum(memory.unreachable for memory in self._memories.values())

    def _ours(self, key: Key) -> dict[str, Any] | None:
        """The job as it is known; None where there is nothing to do for us."""
        raw = self.cluster.known(RLJOB, *key)
        if raw is None:
            self._memories.pop(key, None)
            if self.members is not None:
                self.members.forget(key)
            self.metrics.forget(key)
            return None
        if pods.is_leaving(raw):
            return raw if apply.holds_finalizer(raw) else None
        return raw if (raw.get("spec") or {}).get("managedBy") in (None, "", _US) else None

    async def _leave(self, observed: Observed, decision: JobDecision) -> ReconcileResult:
        left = self._in_members(observed).remove()
        left += await apply.finish(self.cluster, dict(observed.raw))
        if left:
            status = termination.with_deletion(decision.status, left)
            await apply.write_status(self.cluster, self.cluster.known(RLJOB, *observed.key), status)
        else:
            await apply.let_go(self.cluster, dict(observed.raw))
        return ReconcileResult(again_s=self.settings.resync_s if left and observed.members else None)

    async def _perform(self, observed: Observed, decision: JobDecision, memory: Memory) -> ReconcileResult:
        if decision.has_ended and termination.end_of_status(job_status.read_job_status(observed.raw)) is None:
            # The end is written before the pods go that told of it: a crash between the two must not make the job run again.
            await self._write_statuses(observed, decision)
        certificates_at: datetime | None = None
        refused: list[Refusal] = []
        if observed.job is not None and not decision.stops_first:
            certificates_at, refused = await self._bring_about(observed, decision, memory)
        elif not decision.wanted.any_pods:
            refused = await apply.stop(self.cluster, owner=apply.ownership_of(observed.raw))
        if refused and not self._has_begun(observed, decision):
            held_up = events.refusal_condition(refused)
            await self.say(observed.key, held_up, conditions=decision.status["conditions"])
            return ReconcileResult(again_s=self._times_s()[0], refused=held_up.reason)
        # A pod that should go is told of after it went: a failure that is counted is never acted on again.
        await apply.delete_pods(
            self.cluster, decision.delete_pods, among=[pod for pod in observed.pods if not pods.cluster_of(pod)]
        )
        is_told_first = self._in_members(observed).hand_over(decision)
        for name, change in decision.workload_statuses.items():
            await self.cluster.merge(observed.workloads[name], {"status": change}, subresource="status")
        if refused:
            reported = events.refusal_condition(refused)
            await self._warn(observed.raw, reported)
            status = termination.with_blocked_condition(
                observed.raw, reported, status=decision.status, now=observed.now
            )
            delays_s = [each for each in (decision.requeue_after_s, self._times_s()[0]) if each is not None]
            decision = replace(decision, status=status, requeue_after_s=min(delays_s))
        await self._write_statuses(observed, decision)
        if decision.delete_job:
            await self.cluster.delete(dict(observed.raw))
        again_s = 0.0 if is_told_first else _soonest(decision.requeue_after_s, certificates_at, now=self.clock.now())
        if memory.settled is not None and not is_told_first:
            memory.rest = self._rest(observed, decision, certificates_at)
        return ReconcileResult(again_s=again_s, refused=events.refusal_condition(refused).reason if refused else "")

    def _rest(self, observed: Observed, decision: JobDecision, certificates_at: datetime | None) -> Rest | None:
        """Return until when nothing is to be done; None: something is, or was."""
        rests_s = _soonest(decision.rests_s, certificates_at, now=self.clock.now())
        has_acted = decision.events or decision.delete_pods or decision.workload_statuses
        if not rests_s or has_acted or observed.job is None or observed.numbers is None:
            return None
        max_cost = observed.job.spec.max_cost
        calls = job_status.calls(observed.numbers, max_cost=max_cost)
        return Rest(until_s=self.clock.monotonic() + rests_s, calls=calls, max_cost=max_cost)

    def _has_begun(self, observed: Observed, decision: JobDecision) -> bool:
        """Whether there is anything to tell of but a refusal: of a job that should run and has no trainer, nothing runs."""
        name = names.trainer(observed.name)
        trainer = self.cluster.known(STATEFUL_SET, observed.key[0], name) or observed.sets.get(name)
        return not decision.wanted.any_pods or pods.asked(trainer) > 0

    def _in_members(self, observed: Observed) -> JobInMembers:
        return JobInMembers(home=self.cluster, members=self.members, observed=observed, settings=self.settings)

    async def _warn(self, raw: Object, reported: Aspect) -> None:
        """Once for each spec."""
        event = JobEvent(kind="Warning", reason=reported.reason, message=reported.message)
        await self.events.send(raw, event, since=str(raw["metadata"].get("generation")))

    async def _bring_about(
        self, observed: Observed, decision: JobDecision, memory: Memory
    ) -> tuple[datetime | None, list[Refusal]]:
        """Certificates and objects; when a certificate is due next, and what was refused."""
        plan = plan_job(observed, decision.wanted, settings=self.settings)
        before = self._state(observed, plan)
        is_due = memory.certificates_at is not None and self.clock.now() >= memory.certificates_at
        if memory.settled == before and not is_due:
            return memory.certificates_at, []
        due_at: datetime | None = None
        refused: list[Refusal] = []
        if decision.wanted.any_pods:
            try:
                due_at = await self._certifier.certify(plan)
            except (NameTakenError, RequestRefusedError) as error:
                refused = [error]
        desired = plan_objects(plan)
        requested, owner = decision.wanted.requested, apply.ownership_of(observed.raw)
        check = StartCheck(
            cluster=self.cluster,
            owner_uid=owner.uid,
            counts=gang.sizes(plan.job),
            is_start=decision.wanted.any_pods and not any(map(pods.asked, observed.sets.values())),
        )
        refused = await apply.apply_objects(
            self.cluster,
            [obj for obj in desired if not decision.has_ended or self._outlives_the_end(obj)],
            owner=owner,
            requested=requested,
            refused=refused,
            check=check,
        )
        memory.warnings = tuple(check.warnings) if check.was_asked else memory.warnings
        kept = tls_secrets.secret_names(observed.name, roles=roles_of(plan.job))
        refused += await apply.prune(self.cluster, desired, owner=owner, secrets=kept, waiting=plan.waiting())
        is_settled = not refused and not requested and self._state(observed, plan) == before
        memory.settled, memory.certificates_at = before if is_settled else None, due_at
        return due_at, refused

    def _outlives_the_end(self, obj: Object) -> bool:
        """Whether an object of a job that has ended is still to be as planned. Whoever deletes a volume of it wants it gone; and a
        StatefulSet without pods does no harm, whatever else is in it."""
        found = self.cluster.known(of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"])
        if of(obj) is STATEFUL_SET:
            return pods.asked(found) > 0
        return of(obj) not in (CLAIM, WORKLOAD) or found is not None

    def _state(self, observed: Observed, plan: JobPlan) -> object:
        """What decides whether the objects are in order; equal where nothing of it has changed."""
        versions = self.cluster.versions(APPLIED, observed.key)
        generation = observed.metadata.get("generation")
        return plan.uid, generation, plan.wanted, plan.defaults, plan.exposures, plan.dials, versions

    async def _write_statuses(self, observed: Observed, decision: JobDecision) -> None:
        clusters = members.clusters_by_pool(observed.raw)
        self.metrics.job(observed.key, decision.status, clusters=clusters, pools=decision.pool_statuses)
        for event in decision.events:
            await self.events.send(observed.raw, event, since=observed.metadata["resourceVersion"])
        for pool, reported in decision.pool_statuses.items():
            if (
                pool in observed.pools
            ):  # one that was just made has its status with the next reconcile, which may tell of its pods too
                found = self.cluster.known(GENERATOR_POOL, observed.key[0], names.pool(observed.name, pool))
                await apply.write_status(self.cluster, found, reported)
        await apply.write_status(self.cluster, self.cluster.known(RLJOB, *observed.key), decision.status)


def _soonest(seconds: float | None, moment: datetime | None, *, now: datetime) -> float | None:
    delays_s = [] if seconds is None else [seconds]
    if moment is not None:
        delays_s.append(max(0.0, (moment - now).total_seconds()))
    return min(delays_s, default=None)
