"""A plug-in is a member of the contract and a line in a registry; here both sides agree."""

import re
from collections.abc import Collection, Iterator

import pytest

from streamrl.spec import OneOf, RLJob, SpecModel
from streamrl.spec.algorithm import AlgorithmSpec, Correction
from streamrl.spec.base import PythonClass
from streamrl.spec.generators import GeneratorEngine, Scaling
from streamrl.spec.scheduling import Dispatch, RankerSpec
from streamrl.spec.task import EnvironmentSpec
from streamrl.spec.tasks.datasets import Dataset
from streamrl.spec.tasks.rewards import Reward
from streamrl.spec.trackers import Trackers
from streamrl.spec.training import TrainerEngine, Weights
from streamrl_operator.autoscaler import POLICIES as SCALING_POLICIES
from streamrl_workers.environments.registry import ENVIRONMENTS
from streamrl_workers.generator.engines import ENGINES as GENERATOR_ENGINES
from streamrl_workers.ranker.folder import RANKERS
from streamrl_workers.rewards.registry import REWARDS
from streamrl_workers.scheduler.dispatch import POLICIES
from streamrl_workers.tasks.dataset import DATASETS
from streamrl_workers.trackers.registry import TRACKERS
from streamrl_workers.trainer.algorithms import ALGORITHMS
from streamrl_workers.trainer.algorithms.corrections import CORRECTIONS
from streamrl_workers.trainer.engines import ENGINES as TRAINER_ENGINES
from streamrl_workers.weights.transports import TRANSPORTS
from support.tree import PACKAGES, ROOT, sources

REGISTRIES: dict[type[OneOf], Collection[str]] = {
    AlgorithmSpec: ALGORITHMS,
    Correction: CORRECTIONS,
    Dataset: DATASETS,
    Dispatch: POLICIES,
    EnvironmentSpec: ENVIRONMENTS,
    GeneratorEngine: GENERATOR_ENGINES,
    RankerSpec: RANKERS,
    Reward: REWARDS,
    Scaling: SCALING_POLICIES,
    TrainerEngine: TRAINER_ENGINES,
    Weights: TRANSPORTS,
}
WITHOUT_REGISTRY = {
    "Advantage",
    "AnswerWeights",
    "EnvFrom",
    "EnvSource",
    "FrozenModel",
    "LifecycleHandler",
    "Model",
    "ResourceClaim",
    "Speculation",
    "Volume",
}
"""Choices that are no plug-ins: a model is a place to load from, speculation is vLLM's own, parts of pods are Kubernetes', weights of answers the task pool's. Advantages are plug-ins alone."""


@pytest.mark.parametrize("union", REGISTRIES, ids=lambda union: union.__name__)
def test_registry_holds_the_members_of_the_contract(union: type[OneOf]) -> None:
    """But the door of plug-ins, which have no registry."""
    assert set(REGISTRIES[union]) == {key for key, kind in union.kinds().items() if kind is not PythonClass}


def test_the_trackers_of_the_contract_are_those_of_the_registry() -> None:
    """No union: a job may have several."""
    assert (*TRACKERS, "python") == Trackers.choices()


def test_every_union_is_accounted_for() -> None:
    assert {union.__name__ for union in unions_below(RLJob)} == {
        union.__name__ for union in REGISTRIES
    } | WITHOUT_REGISTRY


def unions_below(model: type[SpecModel]) -> Iterator[type[OneOf]]:
    """Every one-of that a job can hold."""
    if issubclass(model, OneOf):
        yield model
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, SpecModel):
                yield from unions_below(part)


def test_an_engine_scores_for_a_frozen_model_where_it_says_so() -> None:
    can = {name for name, kind in GENERATOR_ENGINES.items() if kind.create_frozen is not None}
    assert can == set(GeneratorEngine.those(lambda engine: engine.scores_frozen))


def test_each_engine_has_the_fields_that_all_have() -> None:
    for engine in GeneratorEngine.kinds().values():
        needed = {"slots", "kv_cache_bytes"} if engine.needs_model else {"slots"}
        assert needed <= set(dir(engine)) | set(engine.model_fields), engine
        assert {engine.devices_field} - {""} <= {field.alias for field in engine.model_fields.values()}
        assert set(engine.alone_with or ()) <= set(engine.model_fields)


BY_NAME = {
    "cli/streamrl_cli/profile_command.py": "the simulated engine's own field",
    "cli/streamrl_cli/profiling/probe.py": "it is made again with other fields",
    "operator/streamrl_operator/planning/estimate.py": "the simulated trainer's own field",
}
"""Where an engine is asked by name, and why."""


def test_engines_are_asked_for_what_they_can() -> None:
    """Not for their names: a new engine would have to be added to each such place."""
    names = "|".join({*GeneratorEngine.choices(), *TrainerEngine.choices()})
    asks = re.compile(rf"\w\.engine\.({names})\b|engine\.key [!=]= [\"']")
    found = {str(path.relative_to(ROOT)) for path in sources(*PACKAGES) if asks.search(path.read_text())}
    assert found == set(BY_NAME)
