"""A job's life: from everything that is observed to everything that is to be done about it.

    ended before ─▶ no pods, for ever; deleted when its time is over
    being deleted ─▶ no pods       result is there ─▶ ended now
    its queue does not admit it ─▶ no pods, as if suspended (`admission.py`)
    invalid ─▶ what runs stays     suspended, or above `maxCost` ─▶ no pods; the clock stands
    `job.json` is to say something else ─▶ the same, until no pod is left that has read it
    it starts, and a member cluster lacks its part ─▶ all but the pods (`readiness.awaiting_members`)
    its trainer is not ready for the first time ─▶ the trainer's pods alone (`gang.py`)
    it could not start within `startDeadlineSeconds` ─▶ no pods, for as long (`start.py`)
    its scheduler waits for its data ─▶ the trainer's pods alone, nothing is counted
    else it runs: failures are counted, the deadline is looked at, pools are sized, numbers are shown

Level-triggered: only what is observed counts, and the stored status is part of it. The same observation, with the verdict's
status stored, gives the same status and no event. Times are written when something flips.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamrl import names
from streamrl.spec import RLJob
from streamrl.status import RLJobStatus, SetHold, StartStatus
from streamrl_operator.planning import (
    admission,
    conditions,
    failures,
    gang,
    job_status,
    members,
    pods,
    readiness,
    replicas,
    start,
    termination,
)
from streamrl_operator.planning.admission import Held
from streamrl_operator.planning.conditions import COST_ABOVE_MAX, FAILED, READY, SUCCEEDED, SUSPENDED, Aspect
from streamrl_operator.planning.failures import RestartAccounting
from streamrl_operator.planning.objects import job_file
from streamrl_operator.planning.replicas import PoolPlan
from streamrl_operator.planning.termination import End
from streamrl_operator.planning.values import (
    DesiredRun,
    JobDecision,
    JobEvent,
    Object,
    Observed,
    PlanningSettings,
    seconds_since,
    stamp,
)

DATA_CHANGED = "DataChanged"
AUTO_RECONCILE_S = 5.0
"""Between two reconciles where a pool is scaled by us: what it is decided from, heartbeats, comes every few seconds."""
_SUSPEND_REASONS = ("Suspending", "Suspended", admission.EVICTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobView:
    """One job, at one reconcile."""

    observed: Observed
    settings: PlanningSettings
    before: RLJobStatus
    """As stored."""

    @property
    def job(self) -> RLJob:
        assert self.observed.job is not None, "asked only of a valid job"
        return self.observed.job

    @property
    def all_pods(self) -> Sequence[Object]:
        """Pods that are there, and pods that kubelets rejected and that are gone by now."""
        return [*self.observed.pods, *self.observed.rejected]

    @property
    def store(self) -> str:
        """Its directory on the checkpoints' volume."""
        return names.store_name(self.observed.name, uid=str(self.observed.metadata.get("uid", "")))

    @property
    def spec(self) -> Object:
        """As stored."""
        return self.observed.raw.get("spec") or {}


def decide(observed: Observed, *, settings: PlanningSettings) -> JobDecision:
    """What is to be done about the job now."""
    return admission.with_queue(observed, _decide(observed, settings=settings), settings=settings)


def _decide(observed: Observed, *, settings: PlanningSettings) -> JobDecision:
    view = _JobView(observed=observed, settings=settings, before=job_status.read_job_status(observed.raw))
    end = termination.end_of_status(view.before)
    if end is not None:
        return _after_the_end(view, end)
    if observed.metadata.get("deletionTimestamp"):
        return _leaving(view)
    end = termination.end_by_result(observed.numbers)
    if end is not None:
        return _terminated(view, end)
    if observed.job is None:
        return _invalid(view)
    if observed.job.spec.suspend:
        return _suspended(view, why="the job is suspended")
    bound = observed.job.spec.max_cost
    above = job_status.cost_above_max(view.before, bound=bound)
    if bound is not None and above is not None and above.holds and bound.action == "Suspend":
        return _suspended(view, why=f"the job has cost maxCost.amount {bound.amount}")
    if job_file.is_held(observed):
        return _suspended(view, why="the spec was changed, all pods are made again")
    held = admission.held(observed, settings=settings)
    if held is not None:
        return _suspended(view, why=held.message, held=held)
    return _running(view)


def _after_the_end(view: _JobView, end: End) -> JobDecision:
    """Nothing runs, nothing changes; deleted when its time is over."""
    ended = conditions.find(view.before.conditions, SUCCEEDED if end.succeeded else FAILED)
    assert ended is not None, "the end was read from it"
    status = view.before.model_copy(
        update={"completion_time": view.before.completion_time or ended.last_transition_time}
    )
    plans = replicas.stopped(view.observed, why="the job has ended")
    left_s = (
        None
        if view.observed.metadata.get("deletionTimestamp")
        else termination.seconds_to_deletion(status, view.spec, now=view.observed.now)
    )
    decision = _decision(
        view, status, plans, aspects=termination.end_aspects(end), generation=ended.observed_generation, running=False
    )
    return replace(
        decision,
        has_ended=True,
        has_succeeded=end.succeeded,
        delete_job=left_s is not None and left_s <= 0,
        requeue_after_s=None if left_s is None else max(left_s, 0.0),
    )


def _leaving(view: _JobView) -> JobDecision:
    """Being deleted: no pods; what else is to go is the garbage collector's and the finalizer's."""
    plans = replicas.stopped(view.observed, why="the job is being deleted")
    leaving = Aspect(type=READY, holds=False, reason="Deleting", message="the job is being deleted")
    suspended = conditions.kept(view.before.conditions, SUSPENDED)
    return _decision(view, view.before, plans, aspects=conditions.of_job(leaving, suspended=suspended), running=False)


def _terminated(
    view: _JobView, end: End, *, status: RLJobStatus | None = None, reported: Sequence[JobEvent] = ()
) -> JobDecision:
    """The job ends now: no pods at once."""
    before = view.before if status is None else status
    page = view.observed.numbers
    if view.observed.job is not None:  # the last numbers, whenever they were written before
        before = job_status.with_progress(
            before, page, spec=view.job.spec, store=view.store, now=view.observed.now, every_s=0.0
        )
    after = termination.with_end(before, end, page=page, store=view.store, now=view.observed.now)
    plans = replicas.stopped(view.observed, why="the job has ended")
    decision = _decision(view, after, plans, aspects=termination.end_aspects(end), running=False)
    left_s = termination.seconds_to_deletion(after, view.spec, now=view.observed.now)
    events = (*reported, termination.end_event(end))
    return replace(decision, has_ended=True, has_succeeded=end.succeeded, events=events, requeue_after_s=left_s)


def _invalid(view: _JobView) -> JobDecision:
    """What a person must change is said; what runs stays, what does not run is not made. Its deadline and `suspend` hold."""
    observed = view.observed
    deadline_s = job_status.whole_number(view.spec.get("activeDeadlineSeconds"))
    end = termination.end_by_deadline(view.before, deadline_s=deadline_s, now=view.observed.now)
    if end is not None:
        return _terminated(view, end)
    wrong = Aspect(
        type=READY, holds=False, reason=observed.invalid_reason, message=observed.invalid or "spec is not valid"
    )
    suspended = conditions.kept(view.before.conditions, SUSPENDED)
    was = conditions.find(view.before.conditions, READY)
    is_news = was is None or was.reason != wrong.reason
    decision = _decision(view, view.before, (), aspects=conditions.of_job(wrong, suspended=suspended), running=False)
    halted = view.spec.get("suspend") is True or admission.held(observed, settings=view.settings) is not None
    member = observed.trainer_member
    is_known = member is None or not member.unreachable
    trainers = 0 if halted else pods.asked(observed.sets.get(names.trainer(observed.name))) if is_known else 1
    generators = {pool: pods.asked(observed.sets.get(names.pool(view.observed.name, pool))) for pool in observed.pools}
    return replace(
        decision,
        wanted=replace(
            decision.wanted,
            trainers=min(trainers, 1),
            generators=dict.fromkeys(generators, 0) if halted else generators,
        ),
        pool_statuses={
            pool: job_status.plain_status(job_status.read_pool_status(found)) for pool, found in observed.pools.items()
        },
        events=(conditions.warning(wrong.reason, wrong.message),) if is_news else (),
        # Nobody says when defaults are mended.
        requeue_after_s=_next_reconcile_s(view, view.before, deadline_s=deadline_s)
        if trainers or wrong.reason == "InvalidDefaults"
        else None,
        scaling=observed.scaling,
    )


def _suspended(view: _JobView, *, why: str, held: Held | None = None) -> JobDecision:
    """No pods, all at once: the scheduler is a sidecar of the trainer's pod and outlives the trainer's last checkpoint.

    `held`: by its queue.
    """
    observed, before, is_held = view.observed, view.before, job_file.is_held(view.observed)
    holds, message = _without_pods(observed, is_held=is_held)
    message = message if view.job.spec.suspend else why if held is not None and holds else f"{why}: {message}"
    stopped = "Suspended" if held is None else held.reason
    suspended = Aspect(type=SUSPENDED, holds=holds, reason=stopped if holds else "Suspending", message=message)
    status = before.model_copy(
        update={
            "start_time": None,
            "start": None,
            "queue": None,
            "tokens_per_second": None,
            "seen_failures": failures.mark_as_seen(before, all_pods=view.all_pods),
            "holds": (),
        }
    )
    plans = replicas.plan(observed, before=before, halted=why)
    ready = Aspect(type=READY, holds=False, reason=suspended.reason, message=suspended.message)
    decision = _decision(view, status, plans, aspects=conditions.of_job(ready, suspended=suspended), running=False)
    was = conditions.kept(before.conditions, SUSPENDED)
    is_news = suspended.holds and not (was is not None and was.holds)
    reported = (
        JobEvent(kind="Normal", reason=stopped, message=f"{why}: no pods; volumes stay" if held is None else why),
    )
    return replace(
        decision,
        events=(*_scaled(plans), *(reported if is_news else ())),
        is_queued=held is not None,
        stops_first=is_held,
        requeue_after_s=None if held is None else view.settings.resync_s,
    )


def _without_pods(observed: Observed, *, is_held: bool) -> tuple[bool | None, str]:
    """Whether no pod of a suspended job is left, in words too; None: nobody can know."""
    left, unknown = sorted(pods.name(pod) for pod in observed.pods), members.unknown_pods(observed)
    if not left and unknown:
        return None, f"nobody knows whether pods are left: {unknown}"
    if not left and not is_held:
        return True, "no pods; volumes stay"
    first = f", the first is {left[0]}" if left else ""
    return False, f"waits for {len(left)} pods to end{first}{f'; {unknown}' if unknown else ''}"


def _running(view: _JobView) -> JobDecision:
    """Sizes, failures, deadline, numbers."""
    observed, before, spec = view.observed, view.before, view.job.spec
    if changed := next(filter(None, map(pods.changed_data, observed.pods)), ""):
        return _awaiting_data(view, changed)
    if start.seconds_released(before.start, observed=observed) is not None:
        return _let_go(view, before)
    if _starts(before) and (lack := readiness.awaiting_members(observed)) is not None:
        return _awaiting_members(view, lack)
    queue = admission.queue(observed)
    waits = not gang.is_gang(view.job, queue=queue) and gang.awaits_trainer(observed, before=before)
    plans = replicas.plan(
        observed,
        before=before,
        halted=gang.AWAITS_TRAINER if waits else "",
        admitted=admission.admitted(observed),
    )
    counted, holds = _counted(view, plans)
    status = before.model_copy(
        update={
            "start_time": before.start_time or stamp(view.observed.now),
            "completion_time": None,
            "restarts": counted.restarts,
            "ignored_restarts": counted.ignored,
            "seen_failures": counted.seen,
            "holds": holds,
        }
    )
    reported = failures.failure_events(counted, most_restarts=spec.failure_policy.max_restarts)
    deadline_s = spec.active_deadline_seconds
    end = termination.end_by_failure(counted, policy=spec.failure_policy) or termination.end_by_deadline(
        status, deadline_s=deadline_s, now=view.observed.now
    )
    if end is not None:
        return _terminated(view, end, status=status, reported=reported)
    every_s = max(view.settings.resync_s, view.settings.progress_s)
    status = job_status.with_progress(
        status, observed.numbers, spec=spec, store=view.store, now=view.observed.now, every_s=every_s
    )
    of_pods = readiness.ready(observed, plans=plans)
    ready, unreadable = readiness.with_signals_unreachable(
        of_pods, observed=observed, before=before, resync_s=view.settings.resync_s
    )
    begun = _begun(view, plans, ready=of_pods)
    left_s = None if begun is None else start.seconds_to_release(begun, observed=observed)
    if left_s == 0:
        return _let_go(view, status, why=of_pods.message, reported=reported)
    status = status.model_copy(update={"start": begun})
    decision = _decision(view, status, plans, aspects=conditions.of_job(ready), running=True)
    return replace(
        decision,
        events=(*_started(before), *_scaled(plans), *reported, *unreadable, *_dear(view, status)),
        delete_pods=(
            *counted.delete_pods,
            *replicas.outdated_pods(observed),
            *failures.released_pods(observed.pods, held=decision.wanted.held),
        ),
        unreachable=ready.reason == readiness.UNREACHABLE,
        requeue_after_s=min(
            _next_reconcile_s(view, status, deadline_s=deadline_s, plans=plans),
            *([] if left_s is None else [left_s]),
            view.settings.resync_s,
        ),
        rests_s=_rests_s(view, status, plans=plans, every_s=every_s) if ready.holds else 0.0,
    )


def _begun(view: _JobView, plans: Sequence[PoolPlan], *, ready: Aspect) -> StartStatus | None:
    """Return how the job has come to run; None: its queue looks after that (Kueue's `waitForPodsReady`)."""
    if admission.queue(view.observed):
        return None
    advice = "" if ready.reason != "TrainerPending" else ready.message.partition("; ")[2]
    lack = readiness.awaiting_members(view.observed)
    elsewhere = "" if lack is None else lack.message
    missing_pods = next(filter(None, (advice, *(plan.missing_pods for plan in plans), elsewhere)), "")
    return start.next_start(
        view.before.start,
        observed=view.observed,
        ready=ready,
        missing_pods=missing_pods,
        is_new=view.before.start_time is None,
    )


def _let_go(view: _JobView, status: RLJobStatus, *, why: str = "", reported: Sequence[JobEvent] = ()) -> JobDecision:
    """No pods until others have had their chance. `why`: it lets go now; empty: it has, and goes on so."""
    observed, before, deadline_s = view.observed, view.before, view.job.spec.active_deadline_seconds
    end = termination.end_by_deadline(status, deadline_s=deadline_s, now=observed.now)
    if end is not None:
        return _terminated(view, end, status=status)
    begun = start.released(observed) if why or before.start is None else before.start
    ready = conditions.kept(before.conditions, READY)
    if why or ready is None or ready.reason != start.RELEASED:  # something else was in the way meanwhile
        ready = start.not_ready(begun, observed=observed, why=why or "a pod could not start")
    plans = replicas.plan(observed, before=before, halted="the job could not start")
    seen = failures.mark_as_seen(before, all_pods=view.all_pods)
    status = status.model_copy(update={"start": begun, "seen_failures": seen, "holds": (), "queue": None})
    decision = _decision(view, status, plans, aspects=conditions.of_job(ready), running=False)
    told = (conditions.warning(ready.reason, ready.message),) if why else ()
    left_s = start.seconds_released(begun, observed=observed) or 0.0
    return replace(
        decision,
        events=(*reported, *_scaled(plans), *told),
        requeue_after_s=min(left_s, _next_reconcile_s(view, status, deadline_s=deadline_s)),
    )


def _counted(view: _JobView, plans: Sequence[PoolPlan]) -> tuple[RestartAccounting, tuple[SetHold, ...]]:
    """Count what is new, and hold the sets whose pods are rejected."""
    observed, before, desired = view.observed, view.before, _desired(view.job, plans)
    counted = failures.count_restarts(
        before,
        policy=view.job.spec.failure_policy,
        all_pods=view.all_pods,
        sets=observed.sets,
        desired=desired,
        now=observed.now,
    )
    return counted, failures.hold_sets(
        before, new=counted.new, all_pods=view.all_pods, desired=desired, now=observed.now
    )


def _starts(before: RLJobStatus) -> bool:
    """Whether no pod of the job was made since it was new, suspended, or let go of its nodes."""
    return before.start_time is None or (before.start is not None and before.start.released_until is not None)


def _awaiting_members(view: _JobView, ready: Aspect) -> JobDecision:
    """All of the job is made but its pods, at home and in members, so that each API server has its say before the first of them."""
    before, deadline_s = view.before, view.job.spec.active_deadline_seconds
    end = termination.end_by_deadline(before, deadline_s=deadline_s, now=view.observed.now)
    if end is not None:
        return _terminated(view, end)
    plans = replicas.plan(view.observed, before=before, halted="the job waits for a member cluster")
    was = conditions.find(before.conditions, READY)
    is_news = ready.reason == "ClusterRefused" and (was is None or was.reason != ready.reason)
    decision = _decision(view, before, plans, aspects=conditions.of_job(ready), running=False)
    return replace(
        decision,
        wanted=replace(decision.wanted, awaits_members=True),
        events=(*_scaled(plans), *([conditions.warning(ready.reason, ready.message)] if is_news else ())),
        requeue_after_s=_next_reconcile_s(view, before, deadline_s=deadline_s),
    )


def _awaiting_data(view: _JobView, changed: str) -> JobDecision:
    """Keep the trainer's pods alone, uncounted: the kubelet starts the scheduler again, and ends of others without it are no failures."""
    observed, before, deadline_s = view.observed, view.before, view.job.spec.active_deadline_seconds
    plans = replicas.plan(observed, before=before, halted="the data has changed")
    _, holds = _counted(view, plans)  # what is new decides who waits, and counts for nothing else
    status = before.model_copy(
        update={
            "start_time": before.start_time or stamp(observed.now),
            "queue": None,
            "tokens_per_second": None,
            "seen_failures": failures.mark_as_seen(before, all_pods=view.all_pods),
            "holds": holds,
        }
    )
    end = termination.end_by_deadline(status, deadline_s=deadline_s, now=observed.now)
    if end is not None:
        return _terminated(view, end, status=status)
    ready = Aspect(type=READY, holds=False, reason=DATA_CHANGED, message=changed)
    was = conditions.find(before.conditions, READY)
    is_news = was is None or was.reason != DATA_CHANGED
    decision = _decision(view, status, plans, aspects=conditions.of_job(ready), running=True)
    return replace(
        decision,
        events=(*_started(before), *_scaled(plans), *((conditions.warning(DATA_CHANGED, changed),) if is_news else ())),
        delete_pods=failures.released_pods(observed.pods, held=decision.wanted.held),
        requeue_after_s=_next_reconcile_s(view, status, deadline_s=deadline_s),
    )


def _desired(job: RLJob, plans: Sequence[PoolPlan]) -> dict[str, int]:
    """StatefulSet -> pods."""
    name = job.metadata.name
    return {
        names.trainer(name): 1,
        names.trainer_workers(name): job.spec.trainer.nodes - 1,
        **{names.pool(name, plan.name): plan.desired for plan in plans},
    }


def _started(before: RLJobStatus) -> Sequence[JobEvent]:
    if before.start_time is not None:
        return ()
    suspended = conditions.find(before.conditions, SUSPENDED)
    if suspended is not None and suspended.reason in _SUSPEND_REASONS:
        return (JobEvent(kind="Normal", reason="Resumed", message="the job goes on"),)
    return (JobEvent(kind="Normal", reason="Started", message="pods are made"),)


def _dear(view: _JobView, status: RLJobStatus) -> Sequence[JobEvent]:
    """Said once, when the cost goes beyond its bound."""
    above = job_status.cost_above_max(status, bound=view.job.spec.max_cost)
    was = conditions.kept(view.before.conditions, COST_ABOVE_MAX)
    is_news = above is not None and above.holds and not (was is not None and was.holds)
    return (conditions.warning(above.reason, above.message),) if above is not None and is_news else ()


def _scaled(plans: Sequence[PoolPlan]) -> Sequence[JobEvent]:
    return [event for plan in plans for event in plan.events]


def _next_reconcile_s(
    view: _JobView, status: RLJobStatus, *, deadline_s: int | None, plans: Sequence[PoolPlan] = ()
) -> float:
    left_s = termination.seconds_left(status, deadline_s=deadline_s, now=view.observed.now)
    resync_s = view.settings.resync_s
    if any(plan.state is not None for plan in plans):  # we scale one
        resync_s = min(resync_s, AUTO_RECONCILE_S)
    resync_s = min(resync_s, *failures.held_sets(status, now=view.observed.now).values(), resync_s)
    return resync_s if left_s is None else min(left_s, resync_s)


def _rests_s(view: _JobView, status: RLJobStatus, *, plans: Sequence[PoolPlan], every_s: float) -> float:
    """Of a job that has all of its pods, at home alone, and pools of fixed sizes: until its progress is to be written, or its deadline."""
    observed, now = view.observed, view.observed.now
    is_whole = all(plan.state is None and plan.status.ready_replicas == plan.desired for plan in plans)
    since_s = seconds_since(status.progress_time, now=now)
    if not is_whole or status.holds or observed.members or observed.signals_unreachable or since_s is None:
        return 0.0
    left_s = termination.seconds_left(status, deadline_s=view.job.spec.active_deadline_seconds, now=now)
    due_s = every_s - since_s if 0 <= since_s < every_s else 0.0  # else each reading may have to be written
    return due_s if left_s is None else min(left_s, due_s)


def _decision(
    view: _JobView,
    status: RLJobStatus,
    plans: Sequence[PoolPlan],
    *,
    aspects: Sequence[Aspect],
    running: bool,
    generation: int | None = None,
) -> JobDecision:
    """What all branches have in common. `generation`: that the conditions are about; None: the present one."""
    present = view.observed.metadata.get("generation")
    about = present if generation is None else generation
    page = None if termination.end_of_status(view.before) else view.observed.numbers  # an end is final
    diff, frozen = (
        job_status.logprob_diff(view.before, page),
        job_status.process_frozen(view.before, page, running=running),
    )
    job = view.observed.job
    cost = (
        conditions.kept(view.before.conditions, COST_ABOVE_MAX)
        if job is None
        else job_status.cost_above_max(status, bound=job.spec.max_cost)
    )
    doubtful = job_status.doubtful_fields(view.before, spec=None if job is None else job.spec)
    warned = conditions.admission_warning(view.before.conditions, view.observed.warnings)
    entries = members.clusters(view.observed, view.before)
    unreachable = members.unreachable(view.observed, entries)
    all_aspects = (*aspects, *(one for one in (diff, frozen, cost, doubtful, warned, unreachable) if one is not None))
    taken = job_status.images_of_job(view.observed, settings=view.settings, begins=running)
    whole = status.model_copy(
        update={
            "observed_generation": present,
            **conditions.status_update(view.before.conditions, all_aspects, now=view.observed.now, generation=about),
            "restarts": status.restarts or 0,
            "ignored_restarts": status.ignored_restarts or 0,
            "images": taken or status.images,
            "pools": tuple(plan.summary for plan in plans) or status.pools,
            "clusters": entries,
        }
    )
    annotations = view.observed.metadata.get("annotations") or {}
    return JobDecision(
        wanted=DesiredRun(
            trainers=1 if running else 0,
            generators={plan.name: plan.desired for plan in plans},
            images=taken,
            restarted_at=str(annotations.get(names.ANNOTATION_ATTEMPT) or ""),
            keeps_checkpoints=annotations.get(names.ANNOTATION_KEEP_CHECKPOINTS) == "true",
            requested={plan.name: plan.requested for plan in plans if plan.requested is not None},
            asked={plan.name: plan.asked for plan in plans},
            held=frozenset(failures.held_sets(status, now=view.observed.now)),
        ),
        status=job_status.plain_status(whole),
        pool_statuses={plan.name: job_status.plain_status(plan.status) for plan in plans},
        scaling={plan.name: plan.state for plan in plans if plan.state is not None},
    )
