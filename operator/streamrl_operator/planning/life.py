"""A job's life: from everything that is observed to everything that is to be done about it.

    not ours ─▶ nothing            ended before ─▶ no pods, for ever; deleted when its time is over
    being deleted ─▶ no pods       result is there ─▶ ended now
    invalid ─▶ what runs stays     suspended ─▶ no pods; the clock stands
    else it runs: failures are counted, the deadline is looked at, pools are sized, numbers are shown

Level-triggered: only what is observed counts, and the stored status is part of it. The same observation, with the verdict's
status stored, gives the same status and no event. Times are written when something flips.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from streamrl import names
from streamrl.spec import RLJob
from streamrl.status import RLJobStatus
from streamrl_operator.planning import (
    conditions,
    finish,
    images,
    pods,
    progress,
    readiness,
    replicas,
    stored,
    tally,
    unread,
)
from streamrl_operator.planning.conditions import FAILED, READY, SUCCEEDED, SUSPENDED, Aspect
from streamrl_operator.planning.finish import End
from streamrl_operator.planning.moments import stamp
from streamrl_operator.planning.replicas import PoolPlan
from streamrl_operator.planning.values import Event, Object, Observed, Settings, Verdict, Wanted

MANAGED_BY_US = "streamrl.io/operator"
AUTO_LOOK_S = 5.0
"""Between two looks where a pool is scaled by us: what it is decided from, heartbeats, comes every few seconds."""
_SUSPEND_REASONS = ("Suspending", "Suspended")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """One look at one job."""

    observed: Observed
    settings: Settings
    before: RLJobStatus
    """As stored."""

    @property
    def now(self) -> datetime:
        return self.observed.now

    @property
    def job(self) -> RLJob:
        assert self.observed.job is not None, "asked only of a valid job"
        return self.observed.job

    @property
    def name(self) -> str:
        return str(self.observed.raw["metadata"]["name"])

    @property
    def store(self) -> str:
        """Its directory on the checkpoints' volume."""
        return names.store_name(self.name, uid=str(self.observed.raw["metadata"].get("uid", "")))

    @property
    def spec(self) -> Object:
        """As stored."""
        return self.observed.raw.get("spec") or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """Of the job."""
        return self.observed.raw["metadata"].get("annotations") or {}

    @property
    def generation(self) -> int | None:
        generation = self.observed.raw["metadata"].get("generation")
        return generation if isinstance(generation, int) else None

    @property
    def is_leaving(self) -> bool:
        return bool(self.observed.raw["metadata"].get("deletionTimestamp"))


def decide(observed: Observed, *, settings: Settings) -> Verdict:
    """What is to be done about the job now."""
    look = _Look(observed=observed, settings=settings, before=stored.job_status(observed.raw))
    if (look.spec.get("managedBy") or MANAGED_BY_US) != MANAGED_BY_US:
        return Verdict(ours=False, wanted=Wanted(trainers=0, generators={}), status={}, pool_statuses={})
    end = finish.of_status(look.before)
    if end is not None:
        return _after_the_end(look, end)
    if look.is_leaving:
        return _leaving(look)
    end = finish.by_result(observed.numbers)
    if end is not None:
        return _ending(look, end)
    if observed.job is None:
        return _invalid(look)
    if observed.job.spec.suspend:
        return _suspended(look)
    return _running(look)


def _after_the_end(look: _Look, end: End) -> Verdict:
    """Nothing runs, nothing changes; deleted when its time is over."""
    ended = conditions.find(look.before.conditions, SUCCEEDED if end.succeeded else FAILED)
    assert ended is not None, "the end was read from it"
    status = look.before.model_copy(
        update={"completion_time": look.before.completion_time or ended.last_transition_time}
    )
    plans = replicas.stopped(look.observed, why="the job has ended")
    left_s = None if look.is_leaving else finish.seconds_to_deletion(status, look.spec, now=look.now)
    verdict = _verdict(
        look, status, plans, aspects=finish.aspects(end), generation=ended.observed_generation, running=False
    )
    return replace(
        verdict,
        delete_job=left_s is not None and left_s <= 0,
        look_again_s=None if left_s is None else max(left_s, 0.0),
    )


def _leaving(look: _Look) -> Verdict:
    """Being deleted: no pods; what else is to go is the garbage collector's and the finalizer's."""
    plans = replicas.stopped(look.observed, why="the job is being deleted")
    leaving = Aspect(type=READY, holds=False, reason="Deleting", message="the job is being deleted")
    suspended = conditions.kept(look.before.conditions, SUSPENDED)
    return _verdict(look, look.before, plans, aspects=conditions.of_job(leaving, suspended=suspended), running=False)


def _ending(look: _Look, end: End, *, status: RLJobStatus | None = None, told: Sequence[Event] = ()) -> Verdict:
    """The job ends now: no pods at once."""
    before = look.before if status is None else status
    page = look.observed.numbers
    if look.observed.job is not None:  # the last numbers, whenever they were written before
        before = progress.renewed(before, page, spec=look.job.spec, store=look.store, now=look.now, resync_s=0.0)
    after = finish.written(before, end, page=page, store=look.store, now=look.now)
    plans = replicas.stopped(look.observed, why="the job has ended")
    verdict = _verdict(look, after, plans, aspects=finish.aspects(end), running=False)
    left_s = finish.seconds_to_deletion(after, look.spec, now=look.now)
    return replace(verdict, events=(*told, finish.event(end)), look_again_s=left_s)


def _invalid(look: _Look) -> Verdict:
    """What a person must change is said; what runs stays, what does not run is not made. Its deadline and `suspend` hold."""
    observed = look.observed
    deadline_s = progress.count(look.spec.get("activeDeadlineSeconds"))
    end = finish.by_deadline(look.before, deadline_s=deadline_s, now=look.now)
    if end is not None:
        return _ending(look, end)
    wrong = Aspect(type=READY, holds=False, reason="InvalidSpec", message=observed.invalid or "spec is not valid")
    suspended = conditions.kept(look.before.conditions, SUSPENDED)
    was = conditions.find(look.before.conditions, READY)
    is_news = was is None or was.reason != wrong.reason
    verdict = _verdict(look, look.before, (), aspects=conditions.of_job(wrong, suspended=suspended), running=False)
    halted = look.spec.get("suspend") is True
    trainers = 0 if halted else pods.asked(observed.sets.get(names.trainer(look.name)))
    generators = {pool: pods.asked(observed.sets.get(names.pool(look.name, pool))) for pool in observed.pools}
    return replace(
        verdict,
        wanted=replace(
            verdict.wanted, trainers=min(trainers, 1), generators=dict.fromkeys(generators, 0) if halted else generators
        ),
        pool_statuses={pool: stored.plain(stored.pool_status(found)) for pool, found in observed.pools.items()},
        events=(finish.warning(wrong.reason, wrong.message),) if is_news else (),
        look_again_s=_soonest(look, deadline_s) if trainers else None,
        scaling=observed.scaling,
    )


def _soonest(look: _Look, deadline_s: int | None) -> float:
    left_s = finish.seconds_left(look.before, deadline_s=deadline_s, now=look.now)
    return look.settings.resync_s if left_s is None else min(left_s, look.settings.resync_s)


def _suspended(look: _Look) -> Verdict:
    """No pods, all at once: the scheduler is a sidecar of the trainer's pod and outlives the trainer's last checkpoint."""
    observed, before = look.observed, look.before
    left = sorted(pods.name(pod) for pod in observed.pods)
    message = f"waits for {len(left)} pods to end, the first is {left[0]}" if left else "no pods; volumes stay"
    suspended = Aspect(type=SUSPENDED, holds=not left, reason="Suspending" if left else "Suspended", message=message)
    status = before.model_copy(
        update={
            "start_time": None,
            "queue": None,
            "tokens_per_second": None,
            "seen_failures": tally.mark(before, all_pods=observed.pods),
        }
    )
    plans = replicas.plan(observed, before=before, halted="the job is suspended")
    ready = Aspect(type=READY, holds=False, reason=suspended.reason, message=suspended.message)
    verdict = _verdict(look, status, plans, aspects=conditions.of_job(ready, suspended=suspended), running=False)
    is_news = suspended.holds and not conditions.holds(before.conditions, SUSPENDED)
    told = (Event(kind="Normal", reason="Suspended", message="the job is suspended: no pods; volumes stay"),)
    return replace(verdict, events=(*_scaled(plans), *(told if is_news else ())))


def _running(look: _Look) -> Verdict:
    """Sizes, failures, deadline, numbers."""
    observed, before, spec = look.observed, look.before, look.job.spec
    plans = replicas.plan(observed, before=before)
    counted = tally.count(
        before,
        policy=spec.failure_policy,
        all_pods=observed.pods,
        sets=observed.sets,
        desired=_desired(look.job, plans),
        now=look.now,
    )
    status = before.model_copy(
        update={
            "start_time": before.start_time or stamp(look.now),
            "completion_time": None,
            "restarts": counted.restarts,
            "ignored_restarts": counted.ignored,
            "seen_failures": counted.seen,
        }
    )
    told = tally.events(counted, most_restarts=spec.failure_policy.max_restarts)
    deadline_s = spec.active_deadline_seconds
    end = finish.by_failure(counted, policy=spec.failure_policy) or finish.by_deadline(
        status, deadline_s=deadline_s, now=look.now
    )
    if end is not None:
        return _ending(look, end, status=status, told=told)
    status = progress.renewed(
        status, observed.numbers, spec=spec, store=look.store, now=look.now, resync_s=look.settings.resync_s
    )
    ready, unreadable = unread.told(
        readiness.ready(observed, plans=plans), observed=observed, before=before, resync_s=look.settings.resync_s
    )
    verdict = _verdict(look, status, plans, aspects=conditions.of_job(ready), running=True)
    left_s = finish.seconds_left(status, deadline_s=deadline_s, now=look.now)
    return replace(
        verdict,
        events=(*_started(before), *_scaled(plans), *told, *unreadable),
        delete_pods=counted.delete_pods,
        unreachable=ready.reason == unread.UNREACHABLE,
        look_again_s=_next_look_s(look, plans, left_s=left_s),
    )


def _desired(job: RLJob, plans: Sequence[PoolPlan]) -> dict[str, int]:
    """StatefulSet -> pods."""
    name = job.metadata.name
    return {
        names.trainer(name): 1,
        names.trainer_workers(name): job.spec.trainer.nodes - 1,
        **{names.pool(name, plan.name): plan.desired for plan in plans},
    }


def _started(before: RLJobStatus) -> Sequence[Event]:
    if before.start_time is not None:
        return ()
    suspended = conditions.find(before.conditions, SUSPENDED)
    if suspended is not None and suspended.reason in _SUSPEND_REASONS:
        return (Event(kind="Normal", reason="Resumed", message="the job goes on"),)
    return (Event(kind="Normal", reason="Started", message="pods are made"),)


def _scaled(plans: Sequence[PoolPlan]) -> Sequence[Event]:
    return [event for plan in plans for event in plan.events]


def _next_look_s(look: _Look, plans: Sequence[PoolPlan], *, left_s: float | None) -> float:
    is_scaled_by_us = any(plan.state is not None for plan in plans)
    looks_s = [
        look.settings.resync_s,
        *([AUTO_LOOK_S] if is_scaled_by_us else []),
        *([] if left_s is None else [left_s]),
    ]
    return min(looks_s)


def _verdict(
    look: _Look,
    status: RLJobStatus,
    plans: Sequence[PoolPlan],
    *,
    aspects: Sequence[Aspect],
    running: bool,
    generation: int | None = None,
) -> Verdict:
    """What all branches have in common. `generation`: that the conditions are about; None: the present one."""
    about = look.generation if generation is None else generation
    taken = images.of_job(look.observed, settings=look.settings, begins=running)
    whole = status.model_copy(
        update={
            "observed_generation": look.generation,
            "conditions": conditions.renewed(look.before.conditions, aspects, now=look.now, generation=about),
            "restarts": status.restarts or 0,
            "ignored_restarts": status.ignored_restarts or 0,
            "images": taken or status.images,
            "pools": tuple(plan.summary for plan in plans) or status.pools,
        }
    )
    annotations = look.annotations
    return Verdict(
        wanted=Wanted(
            trainers=1 if running else 0,
            generators={plan.name: plan.desired for plan in plans},
            images=taken,
            restarted_at=str(annotations.get(names.ANNOTATION_ATTEMPT) or ""),
            keeps_checkpoints=annotations.get(names.ANNOTATION_KEEP_CHECKPOINTS) == "true",
            requested={plan.name: plan.requested for plan in plans if plan.requested is not None},
        ),
        status=stored.plain(whole),
        pool_statuses={plan.name: stored.plain(plan.status) for plan in plans},
        scaling={plan.name: plan.state for plan in plans if plan.state is not None},
    )
