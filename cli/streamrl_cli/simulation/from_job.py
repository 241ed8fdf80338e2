"""The scenario of an RLJob with simulated engines: the same run without processes, in virtual time. Pure.

Taken over: seed, group size, longest completion, pipeline, scheduling, pools with their engines, costs and scaling, the
trainer's engine, the interval of checkpoints. What a job does not say of time keeps the scenario's default.
"""

from typing import Any

from pydantic import ValidationError

from streamrl.errors import UserError, UserErrors
from streamrl.spec import RLJob
from streamrl.spec.base import SpecModel
from streamrl.spec.generators import GeneratorPool
from streamrl_cli.simulation.scenario import Scenario

WITHIN_GROUP_PERCENT = 50.0
"""As the simulated engine draws lengths (`engines/simulated_samples.py`)."""


def scenario_of(job: RLJob) -> Scenario:
    """The scenario that the job's own engines describe.

    Raises:
        UserErrors: the job has real engines, or what the simulator cannot take over.
    """
    mistakes = list(_mistakes(job))
    if mistakes:
        raise UserErrors(mistakes)
    try:
        return Scenario.model_validate(_fields(job))
    except ValidationError as error:  # what is allowed there and not here is in the engines alone
        rules = [details["msg"].removeprefix("Value error, ") for details in error.errors()]
        raise UserErrors([UserError(field="spec.generators", rule=rule) for rule in rules]) from None


def _fields(job: RLJob) -> dict[str, Any]:
    spec = job.spec
    engine, trainer = spec.generators[0].engine.value, spec.trainer.engine.value
    return {
        "seed": spec.seed,
        "groupSize": spec.task.group_size,
        "maxTokens": spec.task.sampling.max_tokens,
        "pipeline": spec.pipeline,
        "scheduling": spec.scheduling,
        "pools": tuple(_pool(pool) for pool in spec.generators),
        "lengths": {
            "logNormal": {"medianTokens": engine.mean_tokens, "sigma": engine.sigma},
            "withinGroupPercent": WITHIN_GROUP_PERCENT,
        },
        "trainer": {
            "secondsPerToken": trainer.seconds_per_token,
            "secondsPerStep": trainer.seconds_per_step,
            "weightBytes": trainer.weight_bytes,
            "checkpointIntervalSteps": spec.storage.checkpoints.interval_steps,
            "costPerHour": spec.trainer.cost_per_hour,
        },
    }


def _pool(pool: GeneratorPool) -> dict[str, Any]:
    engine = pool.engine.value
    scaled = [{"batch": p.batch, "milliseconds": p.milliseconds * engine.time_scale} for p in engine.latency]
    return {
        "name": pool.name,
        "scaling": pool.scaling,
        "slots": engine.slots,
        "latency": tuple(scaled),
        "costPerHour": pool.cost_per_hour,
    }


def _mistakes(job: RLJob) -> list[UserError]:
    spec = job.spec
    if spec.trainer.engine.simulated is None:
        rule = "must be simulated: real engines have no model of their time"
        return [UserError(field="spec.trainer.engine", rule=rule, fix="write a scenario: docs/simulator.md")]
    found = []
    engines = [pool.engine.value for pool in spec.generators]
    if len({(engine.mean_tokens, engine.sigma) for engine in engines}) > 1:
        rule = "must have the same meanTokens and sigma: a length belongs to the prompt here, not to the pool"
        found.append(UserError(field="spec.generators", rule=rule))
    if any(engine.time_scale == 0 for engine in engines):
        found.append(UserError(field="spec.generators", rule="must have a timeScale above 0", got=0))
    if spec.task.environment is not None:
        found.append(UserError(field="spec.task.environment", rule="is not simulated: samples have one turn"))
    if _wants_draws(spec.algorithm.value):
        found.append(UserError(field="spec.algorithm", rule="must be without dynamicSampling: rewards are all equal"))
    if spec.scheduling.ranker is not None:
        rule = "reads real prompts, which a simulation does not have"
        found.append(UserError(field="spec.scheduling.ranker", rule=rule, fix="write a scenario with its ranker"))
    return found


def _wants_draws(algorithm: SpecModel) -> bool:
    return getattr(algorithm, "dynamic_sampling", None) is not None
