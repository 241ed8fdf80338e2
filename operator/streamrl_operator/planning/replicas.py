"""How many pods each pool should have, whatever they do, and who says so; and which of its pods are replaced after a change of their template.

    static    the job: scaling.static.replicas
    auto      the autoscaler's policy, which goes on from what somebody sets through /scale; its memory is made again of what the pool has
    external  GeneratorPool.spec.replicas, which somebody else sets through /scale

`spec.replicas` has a field manager of its own. We write it when the pool is made, for every change of static and auto, and
once when a pool becomes external and the field is not known to be ours already; never else in external. What is asked is
clamped to the pool's bounds. A job that does not run wants no pods: that overrides the number, it never changes it.

A StatefulSet replaces its pods one after another: its own maxUnavailable stands behind a feature gate, and API servers without it drop the field.
A pool of 32 that drains for 90 s and loads weights for minutes would take hours. Its pods hold nothing that is lost, so where the pool has
`pod.maxUnavailable` its StatefulSet has the strategy OnDelete, and the operator deletes as many as may be away. Level-triggered: what counts is
which pods are of the newest revision.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from streamrl.names import LABEL_JOB, LABEL_POOL, REPLICAS_MANAGER
from streamrl.names import pool as pool_name
from streamrl.spec.generators import GeneratorPool, Scaling
from streamrl.spec.task import AgentPool
from streamrl.status import GeneratorPoolStatus, PoolSummary, RLJobStatus, Scaled
from streamrl_operator.autoscaler import decide
from streamrl_operator.autoscaler.values import Decision, ScalingState, observe, resized
from streamrl_operator.planning import conditions, job_status, members, pods
from streamrl_operator.planning.conditions import CLUSTER_UNREACHABLE, READY, Aspect
from streamrl_operator.planning.values import JobEvent, Object, Observed, stamp

MOST_REPLICAS = 1024
LONGEST_HISTORY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """What is to be done about one pool."""

    name: str
    desired: int
    """Pods."""
    requested: int | None
    """`spec.replicas` to be written; None: leave it alone."""
    asked: int = 0
    """Pods within bounds, whatever a queue admits."""
    status: GeneratorPoolStatus
    state: ScalingState | None = None
    """For the next reconcile; None: nothing to remember."""
    events: tuple[JobEvent, ...] = ()
    missing_pods: str = ""
    """What to do about pods that should be there by now and were not made."""

    @property
    def summary(self) -> PoolSummary:
        """For the job's status."""
        return PoolSummary(name=self.name, desired=self.desired, ready=self.status.ready_replicas or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """How many replicas are asked for, within bounds."""

    replicas: int
    reason: str
    requested: int | None
    state: ScalingState | None
    held: str


def bounds(scaling: Scaling) -> tuple[int, int]:
    """Least and most replicas, whoever asks."""
    if scaling.static is not None:
        return scaling.static.replicas, scaling.static.replicas
    if scaling.auto is not None:
        return scaling.auto.min_replicas, scaling.auto.max_replicas
    return 0, MOST_REPLICAS


def clamped(replicas: int, scaling: Scaling) -> int:
    """`replicas` within the bounds."""
    least, most = bounds(scaling)
    return min(max(replicas, least), most)


def plan(
    observed: Observed, *, before: RLJobStatus, halted: str = "", admitted: Mapping[str, int] | None = None
) -> list[PoolPlan]:
    """For all pools of a valid job that has not ended. `halted`: why no pods are wanted; empty: the job runs.

    `admitted`: pool -> pods that its queue admits; None: it is in none.
    """
    assert observed.job is not None, "an invalid job's pools are left as they are"
    plans = []
    for pool in observed.job.spec.pools:
        most = None if admitted is None else admitted.get(pool.name, 0)
        asked = _ask(pool, observed=observed, before=before, halted=bool(halted), most=most)
        plans.append(_pool_plan(pool.name, asked, observed=observed, halted=halted, most=most))
    return plans


def stopped(observed: Observed, *, why: str) -> list[PoolPlan]:
    """For all pools of a job that has ended or goes: no pods, and whatever is asked changes nothing."""
    job = observed.job
    known = observed.pools if job is None else [pool.name for pool in job.spec.pools]
    return [_pool_plan(name, None, observed=observed, halted=why) for name in known]


def _ask(
    pool: GeneratorPool | AgentPool, *, observed: Observed, before: RLJobStatus, halted: bool, most: int | None
) -> _Asked:
    found, kind = observed.pools.get(pool.name), pool.scaling.key
    spec = {} if found is None else found.get("spec") or {}
    now = spec["replicas"] if isinstance(spec.get("replicas"), int) else None
    have = now if now is not None else _remembered(pool.name, before) or pool.scaling.initial
    decision, state = _decide(pool, observed=observed, have=have, halted=halted, most=most)
    within = clamped(decision.replicas, pool.scaling)
    is_first = found is None or (now == pool.scaling.initial and not job_status.read_pool_status(found).scaling_history)
    reason = "initialReplicas" if is_first and kind != "static" else decision.reason
    if within != decision.replicas:
        least, most = bounds(pool.scaling)
        reason = f"{reason}; bounds are {least} to {most}"
    if kind == "external":  # `scaling` is its kind when it was last applied
        write = now is None or (spec.get("scaling") != kind and not _is_held(found))
    else:
        write = decision.replicas != now or _is_held(found) is False
    return _Asked(
        replicas=within,
        reason=reason,
        requested=decision.replicas if write else None,
        state=state if kind == "auto" and not halted else None,
        held=decision.held,
    )


def _decide(
    pool: GeneratorPool | AgentPool, *, observed: Observed, have: int, halted: bool, most: int | None
) -> tuple[Decision, ScalingState]:
    kind, state = pool.scaling.key, ScalingState(wanted=have)
    halted = halted or bool(observed.unreachable_of(pool.name))
    if kind == "external":
        return Decision(replicas=have, reason=f"set to {have} through /scale"), state
    if kind == "auto":
        state = observed.scaling.get(pool.name, state)
        if have != state.wanted and _is_held(observed.pools.get(pool.name)) is False:
            state = resized(state, replicas=clamped(have, pool.scaling), now_s=observed.at_s)
            return Decision(replicas=state.wanted, reason=f"set to {have} through /scale"), state
        if halted:
            return Decision(replicas=clamped(state.wanted, pool.scaling), reason="as before"), state
        if most is not None:
            return _decide_in_queue(pool, state=state, observed=observed, have=have, most=most)
    return decide(pool, state=state, numbers=observed.numbers, now_s=observed.at_s)


def _decide_in_queue(
    pool: GeneratorPool | AgentPool, *, state: ScalingState, observed: Observed, have: int, most: int
) -> tuple[Decision, ScalingState]:
    """The policy decides about what is admitted. What it asks for beyond that is asked of the queue until it is admitted, or until the
    policy asks for less than there is; meanwhile all is measured as it is."""
    there = min(have, most)
    if state.wanted != there:
        state = resized(state, replicas=there, now_s=observed.at_s)
    seen = observe(observed.numbers, pool=pool.name, wanted=there, now_s=observed.at_s)
    decision, after = decide(pool, state=state, numbers=observed.numbers, now_s=observed.at_s)
    if decision.replicas > most:
        if after.pace is not state.pace:  # a window has ended with this look
            state = replace(state, base=seen, pace=after.pace, looks=0, queued=0)
        return replace(decision, replicas=max(decision.replicas, have)), state
    if decision.replicas == there < have:
        return replace(decision, replicas=have), after
    return decision, after


def _remembered(name: str, before: RLJobStatus) -> int | None:
    """What the job's status says of a pool whose object is not seen: a lost object is no reason to begin again."""
    return next((pool.desired or None for pool in before.pools if pool.name == name), None)


def _is_held(found: Object | None) -> bool | None:
    """Whether our manager holds `spec.replicas`; None: nobody knows who holds which field, since a cache may leave that out."""
    managed = ((found or {}).get("metadata") or {}).get("managedFields") or ()
    ours = [one for one in managed if (one.get("manager"), one.get("operation")) == (REPLICAS_MANAGER, "Apply")]
    if not managed:
        return None
    return any("f:replicas" in ((one.get("fieldsV1") or {}).get("f:spec") or {}) for one in ours)


def _pool_plan(
    name: str, asked: _Asked | None, *, observed: Observed, halted: str, most: int | None = None
) -> PoolPlan:
    before = job_status.read_pool_status(observed.pools.get(name))
    history = before.scaling_history
    events: tuple[JobEvent, ...] = ()
    if asked is not None:
        history, events = _reported(name, asked, history, now=stamp(observed.now))
    wanted = 0 if halted or asked is None else asked.replicas
    desired = wanted if most is None else min(wanted, most)
    lost = observed.unreachable_of(name)
    reported = "" if lost else _missing_pods(name, before, history, observed=observed, desired=desired)
    held = "" if asked is None else asked.held[:1024]
    held = f"the queue admits {desired} of {wanted} generators" if desired < wanted else held
    # No pods are wanted, it is held at its size, or its last change: it stays while nothing changes.
    reason = halted or held or (history[-1].reason if history else None)
    return PoolPlan(
        name=name,
        desired=desired,
        asked=wanted,
        requested=None if asked is None else asked.requested,
        state=None if asked is None else asked.state,
        status=(
            _frozen(name, before, observed=observed, desired=desired, lost=lost)
            if lost
            else _status(name, before, observed=observed, desired=desired, reported=reported)
        ).model_copy(update={"reason": reason, "scaling_history": history}),
        events=events,
        missing_pods=reported,
    )


def _missing_pods(
    name: str, before: GeneratorPoolStatus, history: Sequence[Scaled], *, observed: Observed, desired: int
) -> str:
    if sum(pods.is_of_pool(pod, name) for pod in observed.pods) >= desired:
        return ""
    since = (
        job_status.read_job_status(observed.raw).start_time,
        history[-1].time if history else None,
        *pods.trainer_ready_times(observed.pods),  # the pool may have waited for that
        conditions.false_since(before.conditions, READY),
    )
    stateful_set = pool_name(observed.name, name)
    return pods.missing_pods_advice(stateful_set, observed=observed, pods=desired, since=since)


def _reported(
    name: str, asked: _Asked, history: tuple[Scaled, ...], *, now: str
) -> tuple[tuple[Scaled, ...], tuple[JobEvent, ...]]:
    """The history with a change of what is asked, and its event. The first entry is the pool's beginning: no event."""
    had = history[-1].to_replicas if history else 0
    if history and had == asked.replicas:
        return history, ()
    entry = Scaled(time=now, from_replicas=had, to_replicas=asked.replicas, reason=asked.reason[:1024])
    message = f"pool {name}: {had} -> {asked.replicas} replicas: {asked.reason}"
    events = (JobEvent(kind="Normal", reason="Scaled", message=message),) if history else ()
    return (*history, entry)[-LONGEST_HISTORY:], events


def _status(
    name: str, before: GeneratorPoolStatus, *, observed: Observed, desired: int, reported: str
) -> GeneratorPoolStatus:
    found = observed.pools.get(name) or {}
    mine = [pod for pod in observed.pods if pods.is_of_pool(pod, name)]
    staying = [pod for pod in mine if not pods.is_leaving(pod)]
    ready = sum(pods.is_ready(pod) for pod in staying)
    generation = (found.get("metadata") or {}).get("generation")
    return GeneratorPoolStatus(
        observed_generation=generation,
        conditions=conditions.renewed(
            before.conditions,
            [_ready(staying, ready=ready, desired=desired, reported=reported)],
            now=observed.now,
            generation=generation,
        ),
        replicas=len(staying),
        ready_replicas=ready,
        desired_replicas=desired,
        selector=f"{LABEL_JOB}={observed.name},{LABEL_POOL}={name}",
    )


def _frozen(
    name: str, before: GeneratorPoolStatus, *, observed: Observed, desired: int, lost: str
) -> GeneratorPoolStatus:
    """Of a pool of whose pods nothing newer is known: they are taken to be there, and to be ready where the scheduler hears them."""
    hears = members.connected(observed, name)
    heard = "" if hears is None else f"; the scheduler hears {hears} generators"
    unknown = Aspect(type=READY, holds=None, reason=CLUSTER_UNREACHABLE, message=f"{lost}{heard}")
    generation = ((observed.pools.get(name) or {}).get("metadata") or {}).get("generation")
    return before.model_copy(
        update={
            "observed_generation": generation,
            "conditions": conditions.renewed(before.conditions, [unknown], now=observed.now, generation=generation),
            "ready_replicas": before.ready_replicas if hears is None else hears,
            "desired_replicas": desired,
            "selector": before.selector or f"{LABEL_JOB}={observed.name},{LABEL_POOL}={name}",
        }
    )


def _ready(staying: Sequence[Object], *, ready: int, desired: int, reported: str) -> Aspect:
    if desired == 0:
        return Aspect(type=READY, holds=False, reason="NoPodsWanted", message="no pods are wanted")
    counts = f"{ready} of {desired} pods are ready"
    if ready >= desired:
        return Aspect(type=READY, holds=True, reason="AllReady", message=counts)
    waiting_reason = pods.first_waiting_reason(staying)
    if waiting_reason is None:
        return Aspect(type=READY, holds=False, reason="Starting", message=f"{counts}{reported}")
    return Aspect(type=READY, holds=False, reason=waiting_reason.reason, message=f"{counts}; {waiting_reason.message}")


_ON_DELETE = "OnDelete"


def outdated_pods(observed: Observed) -> tuple[str, ...]:
    """Names of the pods that are to go now, of all pools."""
    assert observed.job is not None, "asked only of a valid job"
    return tuple(
        name
        for pool in observed.job.spec.pools
        if pool.pod.max_unavailable is not None
        for name in _of_pool(observed, pool=pool.name, most_away=pool.pod.max_unavailable)
    )


def _of_pool(observed: Observed, *, pool: str, most_away: int) -> Iterator[str]:
    found = observed.sets.get(pool_name(observed.name, pool))
    revision = newest_revision(found)
    if found is None or not revision:
        return
    mine = [pod for pod in observed.pods if pods.is_of_pool(pod, pool)]
    ready = sum(pods.is_ready(pod) for pod in mine)
    left = most_away - max(pods.asked(found) - ready, 0)
    outdated = [pod for pod in mine if pods.label(pod, pods.LABEL_REVISION) != revision and not pods.is_leaving(pod)]
    for pod in sorted(outdated, key=pods.place, reverse=True):
        if not pods.is_ready(pod):  # it is away anyway
            yield pods.name(pod)
        elif left > 0:
            left -= 1
            yield pods.name(pod)


def newest_revision(found: Object | None) -> str:
    """Of a StatefulSet; empty where it replaces its pods itself, its new pods wait, or its controller has not seen the newest template yet."""
    if (
        found is None
        or pods.is_gated((found.get("spec") or {}).get("template") or {})
        or ((found.get("spec") or {}).get("updateStrategy") or {}).get("type") != _ON_DELETE
    ):
        return ""
    status = found.get("status") or {}
    is_seen = int(status.get("observedGeneration") or 0) >= int(found["metadata"].get("generation") or 0)
    return str(status.get("updateRevision") or "") if is_seen else ""
