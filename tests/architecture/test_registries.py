"""A plug-in is a member of the contract and a line in a registry; here both sides agree."""

from collections.abc import Collection, Iterator

import pytest

from streamrl.spec import OneOf, RLJob, SpecModel
from streamrl.spec.algorithm import AlgorithmSpec, Correction
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
WITHOUT_REGISTRY = {"EnvFrom", "EnvSource", "FrozenModel", "Model", "ResourceClaim", "Speculation", "Volume"}
"""Choices that are no plug-ins: a model is a place to load from, speculation is vLLM's own, parts of pods are Kubernetes'."""


@pytest.mark.parametrize("union", REGISTRIES, ids=lambda union: union.__name__)
def test_registry_holds_the_members_of_the_contract(union: type[OneOf]) -> None:
    assert set(REGISTRIES[union]) == set(union.choices())


def test_the_trackers_of_the_contract_are_those_of_the_registry() -> None:
    """No union: a job may have several."""
    assert tuple(TRACKERS) == Trackers.choices()


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
