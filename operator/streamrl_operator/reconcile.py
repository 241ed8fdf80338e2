"""One reconcile of one job, and what follows from it. Level-triggered: nothing depends on what has happened, only on what is.

    1  the job as it is known; one of another controller is left alone
    2  the scheduler's numbers, if it is time (`observe.py`)
    3  our finalizer, before anything is made; of a job that is being deleted, the next step of that (`apply.py`)
    4  everything of the job (`observe.py`)
    5  what is to be done (`planning.life`, pure)
    6  certificates that are due, then the objects, then what is no longer wanted, then pods that are to go (`apply.py`)
    7  events; the pools' statuses; the job's status, once and last (an end of the job: before 6)

A reconcile that is interrupted anywhere is made good by the next one. An object that is refused holds up what needs it and nothing else; the
condition Ready says so until it is had.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from streamrl import names
from streamrl_operator import apply, events, tls_secrets
from streamrl_operator.clock import OperatorClock
from streamrl_operator.clusters.member import MemberWork
from streamrl_operator.clusters.registry import Members
from streamrl_operator.events import Events, Refusal
from streamrl_operator.kube.answers import RequestRefusedError
from streamrl_operator.kube.cache import Key
from streamrl_operator.kube.cluster import CachedCluster, NameTakenError
from streamrl_operator.kube.kinds import (
    APPLIED,
    CLAIM,
    GENERATOR_POOL,
    RLJOB,
    SECRET,
    STATEFUL_SET,
    WORKLOAD,
    of,
)
from streamrl_operator.metrics import OperatorMetrics
from streamrl_operator.observe import Memory, NamespaceDefaults, look_up, observe, refresh
from streamrl_operator.planning import gang, job_status, members, pods, termination
from streamrl_operator.planning.certificates import Lives, roles_of
from streamrl_operator.planning.conditions import Aspect
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.members import addresses, anchor, dialled
from streamrl_operator.planning.objects.shared import JobPlan, MemberPlace, kept_claims
from streamrl_operator.planning.values import (
    ExposedAddresses,
    JobDecision,
    JobEvent,
    MemberView,
    Object,
    Observed,
    PlanningSettings,
    trainer_cluster,
)
from streamrl_operator.start_check import StartCheck

_US = "streamrl.io/operator"
"""`managedBy` of the jobs that this operator brings about."""
REFRESHES_PER_S = 10.0
"""Of all running jobs together. Each is a write of a job's status, and an API server with a core for itself does some hundred writes a second."""
_MAX_ROUNDS = 8
"""A change of CA takes three rounds at most in one reconcile; more would be an error of ours."""


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

    async def reconcile(self, key: Key) -> ReconcileResult:
        """One reconcile of a job.

        Raises:
            KubeError: a request failed.
            NameTakenError: an object of that name is somebody else's, and the job cannot begin without it.
        """
        try:
            return await self._reconcile(key)
        except (NameTakenError, RequestRefusedError) as error:
            await self.say(key, events.refusal_condition([error]))
            raise

    async def say(self, key: Key, reported: Aspect) -> None:
        """Tell what is in the way where people look, and nothing else."""
        raw = self._ours(key)
        if raw is None:
            return
        await self._warn(raw, reported)
        stored = raw.get("status") or {}
        status = termination.with_blocked_condition(raw, reported, status=stored, now=self.clock.now())
        self.metrics.job(key, status, clusters=members.clusters_by_pool(raw))
        await apply.write_status(self.cluster, raw, status)

    async def _reconcile(self, key: Key) -> ReconcileResult:
        raw = self._ours(key)
        if raw is None:
            return ReconcileResult()
        memory = self._memories.get(key)
        if memory is None or memory.uid != raw["metadata"]["uid"]:
            memory = self._memories[key] = Memory(uid=raw["metadata"]["uid"])
        if self.members is not None and not self.members.is_known and members.names_member(raw):
            return ReconcileResult(again_s=1.0)
        settings = replace(self.settings, resync_s=self._resync_s())
        await refresh(
            self.cluster,
            raw,
            memory=memory,
            clock=self.clock,
            settings=settings,
            aside=self.aside,
            members=self.members,
        )
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

    def _resync_s(self) -> float:
        """Between two refreshes of a job: longer where there are many, since each is a write."""
        running = sum(memory.asked_s is not None for memory in self._memories.values())
        return max(self.settings.resync_s, running / REFRESHES_PER_S)

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
        left: list[Object] = await self._leave_members(observed)
        left += await apply.finish(self.cluster, dict(observed.raw))
        if left:
            status = termination.with_deletion(decision.status, left)
            await apply.write_status(self.cluster, self.cluster.known(RLJOB, *observed.key), status)
        else:
            await apply.let_go(self.cluster, dict(observed.raw))
        return ReconcileResult(again_s=self.settings.resync_s if left and observed.members else None)

    async def _leave_members(self, observed: Observed) -> list[Object]:
        """Have the job removed from the members that it is in; what stands for each that it is still in."""
        entries = job_status.read_job_status(observed.raw).clusters
        waiting = [entry for entry in entries if not members.is_done(entry, observed)]
        kept, at = apply.kept_by_wish(observed.raw), trainer_cluster(observed.raw)
        for entry in waiting:
            there = kept if entry.name == at else frozenset[str]()
            self._want(entry.name, observed, MemberWork(action="Remove", uid=observed.metadata["uid"], kept=there))
        return [{"kind": "what is in RLCluster", "metadata": {"name": entry.name}} for entry in waiting]

    def _want(self, cluster: str, observed: Observed, work: MemberWork) -> None:
        if self.members is not None:
            self.members.want(cluster, observed.key, work)

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
            await self.say(observed.key, held_up)
            return ReconcileResult(again_s=self._resync_s(), refused=held_up.reason)
        # A pod that should go is told of after it went: a failure that is counted is never acted on again.
        await apply.delete_pods(
            self.cluster, decision.delete_pods, among=[pod for pod in observed.pods if not pods.cluster_of(pod)]
        )
        is_told_first = self._hand_over(observed, decision)
        for name, change in decision.workload_statuses.items():
            await self.cluster.merge(observed.workloads[name], {"status": change}, subresource="status")
        if refused:
            reported = events.refusal_condition(refused)
            await self._warn(observed.raw, reported)
            status = termination.with_blocked_condition(
                observed.raw, reported, status=decision.status, now=observed.now
            )
            delays_s = [each for each in (decision.requeue_after_s, self._resync_s()) if each is not None]
            decision = replace(decision, status=status, requeue_after_s=min(delays_s))
        await self._write_statuses(observed, decision)
        if decision.delete_job:
            await self.cluster.delete(dict(observed.raw))
        again_s = 0.0 if is_told_first else _soonest(decision.requeue_after_s, certificates_at, now=self.clock.now())
        return ReconcileResult(again_s=again_s, refused=events.refusal_condition(refused).reason if refused else "")

    def _has_begun(self, observed: Observed, decision: JobDecision) -> bool:
        """Whether there is anything to tell of but a refusal: of a job that should run and has no trainer, nothing runs."""
        name = names.trainer(observed.name)
        trainer = self.cluster.known(STATEFUL_SET, observed.key[0], name) or observed.sets.get(name)
        return not decision.wanted.trainers or pods.asked(trainer) > 0

    def _hand_over(self, observed: Observed, decision: JobDecision) -> bool:
        """Tell each member what is to be there; whether a status must be written before one may be told."""
        entries = {entry.name: entry for entry in job_status.read_job_status(observed.raw).clusters}
        wanted, uid, is_told_first = members.needed(observed), observed.metadata["uid"], False
        for name, view in wanted.items():
            entry = entries.get(name)
            if entry is None or (view.cluster_uid and entry.cluster_uid != view.cluster_uid):
                is_told_first = True  # it is the memory of where we have been
            elif not view.cluster_uid or entry.namespace != view.namespace:
                continue  # nobody can be told yet, or what is there is elsewhere
            elif decision.has_ended or decision.stops_first:
                self._want(name, observed, MemberWork(action="Stop", uid=uid))
            elif (work := self._member_work(observed, decision, view)) is not None:
                self._want(name, observed, work)
            elif not decision.wanted.any_pods:  # fewer pods can always be had
                self._want(name, observed, MemberWork(action="Stop", uid=uid))
        for name in entries.keys() - wanted.keys():
            if observed.job is not None:
                self._want(name, observed, MemberWork(action="Remove", uid=uid))
            elif not decision.wanted.any_pods:
                self._want(name, observed, MemberWork(action="Stop", uid=uid))
        return is_told_first

    def _member_work(self, observed: Observed, decision: JobDecision, view: MemberView) -> MemberWork | None:
        """All that the job is to have in a member; None while a leaf, the user's modules or the way to the scheduler are not known."""
        assert observed.job is not None, "the member may be used"
        leaves: dict[str, Mapping[str, str]] = {}
        for role, called in members.leaves_in(observed.job, view.cluster).items():
            secret = self.cluster.known(SECRET, observed.key[0], names.tls_secret(observed.name, role))
            if secret is None:
                return None
            leaves[called] = secret["data"]
        place = MemberPlace(
            cluster=view.cluster, namespace=view.namespace, origin=view.origin, leaves=leaves, code=observed.code
        )
        plan = self._plan(observed, decision, place=place)
        if plan.has_trainer and plan.job.spec.task.code is not None and observed.code is None:
            return None
        if not plan.has_trainer and plan.dials is None:
            return None
        deleted = [
            pods.uid(pod)
            for pod in observed.pods
            if pods.cluster_of(pod) == view.cluster and pods.name(pod) in decision.delete_pods
        ]
        return MemberWork(
            action="Apply",
            uid=plan.uid,
            anchor=anchor(plan),
            objects=plan_objects(plan),
            kept=kept_claims(plan) if plan.has_trainer else frozenset(),
            delete_pods=frozenset(deleted),
        )

    def _plan(self, observed: Observed, decision: JobDecision, *, place: MemberPlace | None = None) -> JobPlan:
        """`place`: in a member; None: at home."""
        assert observed.job is not None, "objects are planned of a valid job"
        return JobPlan(
            job=observed.job,
            namespace=observed.key[0],
            uid=observed.metadata["uid"],
            wanted=decision.wanted,
            settings=self.settings,
            resolved=observed.resolved,
            defaults=observed.defaults,
            exposures=members.exposures(observed.job, observed.members),
            place=place,
            dials=_dials(observed, place.cluster if place else ""),
        )

    async def _warn(self, raw: Object, reported: Aspect) -> None:
        """Once for each spec."""
        event = JobEvent(kind="Warning", reason=reported.reason, message=reported.message)
        await self.events.send(raw, event, since=str(raw["metadata"].get("generation")))

    async def _bring_about(
        self, observed: Observed, decision: JobDecision, memory: Memory
    ) -> tuple[datetime | None, list[Refusal]]:
        """Certificates and objects; when a certificate is due next, and what was refused."""
        before = self._state(observed, decision)
        is_due = memory.certificates_at is not None and self.clock.now() >= memory.certificates_at
        if memory.settled == before and not is_due:
            return memory.certificates_at, []
        plan = self._plan(observed, decision)
        due_at: datetime | None = None
        refused: list[Refusal] = []
        if decision.wanted.any_pods:
            try:
                due_at = await self._certify(plan)
            except (NameTakenError, RequestRefusedError) as error:
                refused = [error]
        desired = plan_objects(plan)
        requested, owner = decision.wanted.requested, apply.ownership_of(observed.raw)
        check = StartCheck(cluster=self.cluster, owner_uid=owner.uid, counts=gang.sizes(plan.job))
        refused = await apply.apply_objects(
            self.cluster,
            [obj for obj in desired if not decision.has_ended or self._outlives_the_end(obj)],
            owner=owner,
            requested=requested,
            refused=refused,
            check=check,
        )
        memory.warnings = tuple(check.warnings) if check.was_asked else memory.warnings
        certificates = tls_secrets.secret_names(observed.name, roles=roles_of(plan.job))
        refused += await apply.prune(
            self.cluster, desired, owner=owner, certificates=certificates, waiting=plan.waiting()
        )
        is_settled = not refused and not requested and self._state(observed, decision) == before
        memory.settled, memory.certificates_at = before if is_settled else None, due_at
        return due_at, refused

    def _outlives_the_end(self, obj: Object) -> bool:
        """Whether an object of a job that has ended is still to be as planned. Whoever deletes a volume of it wants it gone; and a
        StatefulSet without pods does no harm, whatever else is in it."""
        found = self.cluster.known(of(obj), obj["metadata"]["namespace"], obj["metadata"]["name"])
        if of(obj) is STATEFUL_SET:
            return pods.asked(found) > 0
        return of(obj) not in (CLAIM, WORKLOAD) or found is not None

    def _state(self, observed: Observed, decision: JobDecision) -> object:
        """What decides whether the objects are in order; equal where nothing of it has changed."""
        versions = self.cluster.versions(APPLIED, observed.key)
        generation = observed.metadata.get("generation")
        assert observed.job is not None, "objects are planned of a valid job"
        ways = members.exposures(observed.job, observed.members), _dials(observed, "")
        return observed.metadata["uid"], generation, decision.wanted, observed.defaults, ways, versions

    async def _certify(self, plan: JobPlan) -> datetime | None:
        """Apply the Secrets that are due, as far as that goes now."""
        roles = roles_of(plan.job)
        for _ in range(_MAX_ROUNDS):
            known = {
                name: secret
                for name in tls_secrets.secret_names(plan.name, roles=roles)
                if (secret := self.cluster.known(SECRET, plan.namespace, name)) is not None
            }
            copies = self._copies(plan)
            made, next_check = tls_secrets.due(plan, known, now=self.clock.now(), lives=self.lives, copies=copies)
            if not made:
                self.metrics.certificates((plan.namespace, plan.name), tls_secrets.ends(plan.name, known, roles=roles))
                return next_check
            for secret in made:  # one that we did not know of is looked at in the next round
                await self.cluster.find_or_make(secret, owner_uid=plan.uid)
                if secret["metadata"]["name"] in known:
                    await self.cluster.apply(secret)
        raise AssertionError(f"certificates of {plan.name} do not settle")

    def _copies(self, plan: JobPlan) -> dict[str, Object]:
        """Role -> the Secret with its leaf in a member, where one is known."""
        if self.members is None:
            return {}
        key = (plan.namespace, plan.name)
        found = {
            role: self.members.known(SECRET, cluster, key, names.tls_secret(plan.name, called))
            for cluster in members.clusters_of(plan.job)
            for role, called in members.leaves_in(plan.job, cluster).items()
        }
        return {role: secret for role, secret in found.items() if secret is not None}

    async def _write_statuses(self, observed: Observed, decision: JobDecision) -> None:
        self.metrics.job(observed.key, decision.status, clusters=members.clusters_by_pool(observed.raw))
        for event in decision.events:
            await self.events.send(observed.raw, event, since=observed.metadata["resourceVersion"])
        for pool, reported in decision.pool_statuses.items():
            if (
                pool in observed.pools
            ):  # one that was just made has its status with the next reconcile, which may tell of its pods too
                found = self.cluster.known(GENERATOR_POOL, observed.key[0], names.pool(observed.name, pool))
                await apply.write_status(self.cluster, found, reported)
        await apply.write_status(self.cluster, self.cluster.known(RLJOB, *observed.key), decision.status)


def _dials(observed: Observed, cluster: str) -> ExposedAddresses | None:
    """Where generators of a cluster (empty: home) dial a scheduler in another one.

    Where the exposure has no address now, they go on dialling where they do: replicas and pods still follow.
    """
    assert observed.job is not None, "asked only of a valid job"
    exposure = members.exposures(observed.job, observed.members).get(cluster)
    if exposure is None:
        return None
    there = [each for each in observed.sets.values() if pods.cluster_of(each) == cluster]
    return addresses(exposure, observed.exposed) or dialled(there)


def _soonest(seconds: float | None, moment: datetime | None, *, now: datetime) -> float | None:
    delays_s = [] if seconds is None else [seconds]
    if moment is not None:
        delays_s.append(max(0.0, (moment - now).total_seconds()))
    return min(delays_s, default=None)
