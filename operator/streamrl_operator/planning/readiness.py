"""Whether a job that should run does, and else what it waits for: its condition Ready."""

from collections.abc import Sequence

from streamrl import names
from streamrl_operator.planning import conditions, pods, stored, unmade
from streamrl_operator.planning.conditions import READY, Aspect
from streamrl_operator.planning.replicas import PoolPlan
from streamrl_operator.planning.values import Object, Observed


def ready(observed: Observed, *, plans: Sequence[PoolPlan]) -> Aspect:
    """The trainer first, all of its nodes, then at least one generator; generators that are missing beside others are told of."""
    job = str(observed.raw["metadata"]["name"])
    trainer = [pod for pod in observed.pods if pods.trains(pod)]
    if not any(pods.is_trainer(pod) for pod in trainer):
        return _unmade(names.trainer(job), "has not made its pod yet", observed=observed, wanted=1)
    nodes = 1 if observed.job is None else observed.job.spec.trainer.nodes
    if len(trainer) < nodes:
        made = f"has made {len(trainer) - 1} of its {nodes - 1} pods yet"
        return _unmade(names.trainer_workers(job), made, observed=observed, wanted=nodes - 1)
    awaited = pods.first_awaited(trainer)
    if awaited is not None:
        return _no(awaited.reason, awaited.message)
    return _generators([pod for pod in observed.pods if pods.is_generator(pod)], plans=plans)


def _unmade(stateful_set: str, what: str, *, observed: Observed, wanted: int) -> Aspect:
    before = stored.job_status(observed.raw)
    since = (before.start_time, conditions.false_since(before.conditions, READY))
    told = unmade.advice(stateful_set, observed=observed, pods=wanted, since=since)
    return _no("TrainerPending", f"StatefulSet {stateful_set} {what}{told}")


def _generators(generators: Sequence[Object], *, plans: Sequence[PoolPlan]) -> Aspect:
    wanted, have = sum(plan.desired for plan in plans), sum(pods.is_ready(pod) for pod in generators)
    if wanted == 0:
        pools = ", ".join(plan.name for plan in plans)
        return _no("NoGenerators", f"no generators are asked for: scale a pool up ({pools})")
    awaited = pods.first_awaited([pod for pod in generators if not pods.is_leaving(pod)])
    unmade_why = next((plan.unmade for plan in plans if plan.unmade), "")
    why = unmade_why if awaited is None else f"; {awaited.message}"
    counts = f"{have} of {wanted} generators are ready"
    if have == 0:
        return _no("GeneratorsPending" if awaited is None else awaited.reason, f"{counts}{why}")
    return Aspect(type=READY, holds=True, reason="Running", message=f"the trainer is ready; {counts}{why}")


def _no(reason: str, message: str) -> Aspect:
    return Aspect(type=READY, holds=False, reason=reason, message=message)
