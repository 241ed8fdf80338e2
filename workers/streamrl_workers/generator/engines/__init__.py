"""The engines by name, as in `generators[].engine` of an RLJob.

A new engine is a module (or a folder) here that keeps `base.Engine`, a creator below, and a member of `GeneratorEngine`.
Creators import their engine when called: the simulated engine never loads torch.
"""

from collections.abc import Callable

from streamrl.spec.generators import SimulatedEngineSpec as SimulatedSpec
from streamrl_workers.generator.engines.base import Engine, EngineOptions


def create_hf(options: EngineOptions) -> Engine:
    """Over a transformers model, on the GPU where there is one."""
    from streamrl_workers.generator.engines.hf.engine import create

    return create(options)


def create_simulated(options: EngineOptions) -> Engine:
    """The engine that only takes time."""
    from streamrl_workers.generator.engines.simulated import SimulatedEngine

    assert isinstance(options.spec, SimulatedSpec)
    return SimulatedEngine(spec=options.spec, slots=options.spec.slots, seed=options.seed)


ENGINES: dict[str, Callable[[EngineOptions], Engine]] = {"hf": create_hf, "simulated": create_simulated}
WITHOUT_MODEL = frozenset({"simulated"})
"""Engines that need no model folder."""


def engine_creator(name: str) -> Callable[[EngineOptions], Engine]:
    """Look up an engine; an unknown name is the user's error and lists the known."""
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is unknown, known are: {', '.join(sorted(ENGINES))}")
    return ENGINES[name]
