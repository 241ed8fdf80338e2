"""Whether a job that should run does, and else what it waits for: its condition Ready.

Without the scheduler's numbers no progress is seen and no pool is scaled by it, so readings that fail for long are said there too:

    scheduler ready, readings fail ──4 resyncs──▶ Ready says NumbersUnreachable, one event ──a good reading──▶ as before

A pod that starts, or is busy for a while, is no news. The condition is the memory: an operator that is replaced goes on saying it.
"""

from collections.abc import Sequence
from dataclasses import replace

from streamrl import names
from streamrl.status import RLJobStatus
from streamrl_operator.planning import conditions, job_status, members, pods
from streamrl_operator.planning.conditions import CLUSTER_UNREACHABLE, READY, Aspect
from streamrl_operator.planning.objects.members import addresses
from streamrl_operator.planning.replicas import PoolPlan
from streamrl_operator.planning.values import JobEvent, Object, Observed, trainer_cluster


def ready(observed: Observed, *, plans: Sequence[PoolPlan]) -> Aspect:
    """The trainer first, all of its nodes, then at least one generator where the job has pools; generators that are missing beside others are told of."""
    member = observed.trainer_member
    if member is not None and member.unreachable:
        message = f"cluster {member.cluster}: {member.unreachable}; what the trainer there does is not known"
        return Aspect(type=READY, holds=None, reason=CLUSTER_UNREACHABLE, message=message)
    if member is not None and member.refused:
        return _no("ClusterRefused", f"cluster {member.cluster}: {member.refused}")
    trainer = [pod for pod in observed.pods if pods.trains(pod)]
    if not any(pods.is_trainer(pod) for pod in trainer):
        return _missing_pods(names.trainer(observed.name), "has not made its pod yet", observed=observed, wanted=1)
    nodes = 1 if observed.job is None else observed.job.spec.trainer.nodes
    if len(trainer) < nodes:
        made = f"has made {len(trainer) - 1} of its {nodes - 1} pods yet"
        return _missing_pods(names.trainer_workers(observed.name), made, observed=observed, wanted=nodes - 1)
    waiting_reason = pods.first_waiting_reason(trainer)
    if waiting_reason is not None:
        return _no(waiting_reason.reason, waiting_reason.message)
    if observed.job is not None and not observed.job.spec.generators:
        return Aspect(
            type=READY, holds=True, reason="Running", message="the trainer is ready; the job has no generators"
        )
    agents = "" if observed.job is None or observed.job.spec.agent_pool is None else names.AGENTS
    told = _generators(
        [pod for pod in observed.pods if pods.is_generator(pod)], plans=[plan for plan in plans if plan.name != agents]
    )
    return _with_agents(_of_members(observed, told), observed, plans=[plan for plan in plans if plan.name == agents])


def _missing_pods(stateful_set: str, what: str, *, observed: Observed, wanted: int) -> Aspect:
    before = job_status.read_job_status(observed.raw)
    since = (before.start_time, conditions.false_since(before.conditions, READY))
    reported = pods.missing_pods_advice(stateful_set, observed=observed, pods=wanted, since=since)
    return _no("TrainerPending", f"StatefulSet {stateful_set} {what}{reported}")


def _generators(generators: Sequence[Object], *, plans: Sequence[PoolPlan]) -> Aspect:
    wanted, have = sum(plan.desired for plan in plans), sum(plan.status.ready_replicas or 0 for plan in plans)
    if wanted == 0:
        pools = ", ".join(plan.name for plan in plans)
        return _no("NoGenerators", f"no generators are asked for: scale a pool up ({pools})")
    waiting_reason = pods.first_waiting_reason([pod for pod in generators if not pods.is_leaving(pod)])
    unmade_why = next((plan.missing_pods for plan in plans if plan.missing_pods), "")
    why = unmade_why if waiting_reason is None else f"; {waiting_reason.message}"
    counts = f"{have} of {wanted} generators are ready"
    if have == 0:
        return _no("GeneratorsPending" if waiting_reason is None else waiting_reason.reason, f"{counts}{why}")
    return Aspect(type=READY, holds=True, reason="Running", message=f"the trainer is ready; {counts}{why}")


def _with_agents(told: Aspect, observed: Observed, *, plans: Sequence[PoolPlan]) -> Aspect:
    """Without an agent host no prompt is made; those that are missing beside others are told of."""
    for plan in plans:
        have = plan.status.ready_replicas or 0
        mine = [pod for pod in observed.pods if pods.is_of_pool(pod, plan.name) and not pods.is_leaving(pod)]
        waiting_reason = pods.first_waiting_reason(mine)
        why = plan.missing_pods if waiting_reason is None else f"; {waiting_reason.message}"
        counts = f"{have} of {plan.desired} agent hosts are ready{why}"
        if have == 0 and told.holds:
            return _no("AgentsPending" if waiting_reason is None else waiting_reason.reason, counts)
        told = replace(told, message=f"{told.message}; {counts}")
    return told


def awaiting_members(observed: Observed) -> Aspect | None:
    """Return the condition of a job of which a member lacks its part: none is started before; None: no member does."""
    if (hindrance := _hindrance(observed)) is not None:
        return _no(*hindrance)
    for name, unreachable in members.awaited(observed).items():
        why = f"cluster {name}: {unreachable or 'it has not all of its part yet'}"
        return _no(CLUSTER_UNREACHABLE if unreachable else "ClusterPending", why)
    return None


def _of_members(observed: Observed, told: Aspect) -> Aspect:
    """With what keeps pools of other clusters than the trainer's from being made."""
    if told.holds:
        hindrance = _hindrance(observed)
        return told if hindrance is None else replace(told, message=f"{told.message}; {hindrance[1]}")
    lack = awaiting_members(observed)
    return told if lack is None else _no(lack.reason, f"{told.message}; {lack.message}")


def _hindrance(observed: Observed) -> tuple[str, str] | None:
    """Return the reason, and words, of the first member in which something of the job cannot be made."""
    ways = {} if observed.job is None else members.exposures(observed.job, observed.members)
    lacking = {
        trainer_cluster(observed.raw) or name for name, way in ways.items() if not addresses(way, observed.exposed)
    }
    for name, member in members.needed(observed).items():
        if member.refused:
            return "ClusterRefused", f"cluster {name}: {member.refused}"
        if not member.unreachable and name in lacking:
            return "ExposurePending", f"cluster {name}: Service {names.exposed(observed.name)} has no address yet"
    return None


def _no(reason: str, message: str) -> Aspect:
    return Aspect(type=READY, holds=False, reason=reason, message=message)


UNREACHABLE = "NumbersUnreachable"
RESYNCS = 4
"""Two minutes, as the operator comes: longer than an API server, a node or a scheduler needs to come back."""
_REMEDY = (
    f"let the operator reach port {names.PORT_SIGNALS} of the trainer's pod, or set the chart's value `numbers: Proxy` "
    "(docs/operations.md, NumbersUnreachable)"
)


def with_signals_unreachable(
    ready: Aspect, *, observed: Observed, before: RLJobStatus, resync_s: float
) -> tuple[Aspect, Sequence[JobEvent]]:
    """The condition Ready, and what is told once, where a job should run and `ready` is all else that is known."""
    signals_unreachable, was = observed.signals_unreachable, conditions.find(before.conditions, READY)
    if signals_unreachable is None:
        return ready, ()
    was_told = was is not None and was.reason == UNREACHABLE
    if not was_told and (observed.now - signals_unreachable.since).total_seconds() < RESYNCS * resync_s:
        return ready, ()
    why = f"the scheduler's numbers cannot be read, so no progress is seen and no pool is scaled by it: {_REMEDY}"
    message = f"{why}; {signals_unreachable.error}"
    unreachable = Aspect(type=READY, holds=False, reason=UNREACHABLE, message=f"{message}; {ready.message}")
    return unreachable, () if was_told else (conditions.warning(UNREACHABLE, message),)
