"""The engines by name, as in `generators[].engine` of an RLJob.

A new engine is a module (or a folder) here that keeps `base.Engine`, a line below, and a member of `GeneratorEngine`: a `GeneratorEngineSpec`, which says
what others ask of an engine: what it can, what it needs. No other file asks for an engine's name.
Creators import their engine when called: the simulated engine never loads torch.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from streamrl.errors import UserError
from streamrl.spec.generators import SimulatedEngineSpec as SimulatedSpec
from streamrl_workers.generator.engines.base import Engine, EngineOptions


def create_hf(options: EngineOptions) -> Engine:
    """Over a transformers model, on the GPU where there is one."""
    from streamrl_workers.generator.engines.hf.engine import create

    return create(options)


def create_frozen_hf(options: EngineOptions, *, pass_tokens: int) -> Engine:
    """Over a transformers model too: log-probs by the trainer's own function."""
    from streamrl_workers.generator.engines.hf.frozen import create

    return create(options, pass_tokens=pass_tokens)


def create_simulated(options: EngineOptions) -> Engine:
    """The engine that only takes time."""
    from streamrl_workers.generator.engines.simulated import SimulatedEngine

    assert isinstance(options.spec, SimulatedSpec)
    return SimulatedEngine(spec=options.spec, slots=options.spec.slots, seed=options.seed)


def create_vllm(options: EngineOptions) -> Engine:
    """vLLM, in processes of its own."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(field="engine.vllm", rule="needs the package vllm", fix="install streamrl[vllm]")
    from streamrl_workers.generator.engines.vllm.options import set_environment

    set_environment(threads=options.threads, traced=options.traces_endpoint is not None)  # before vllm is imported
    from streamrl_workers.generator.engines.vllm.engine import create

    return create(options)


class CreateFrozen(Protocol):
    """Creates an engine that says log-probs of finished samples, and generates nothing; `pass_tokens`: of one forward pass."""

    def __call__(self, options: EngineOptions, *, pass_tokens: int) -> Engine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine as the registry has it."""

    create: Callable[[EngineOptions], Engine]
    create_frozen: CreateFrozen | None = None  # where its spec says `scores_frozen`


ENGINES: dict[str, EngineKind] = {
    "hf": EngineKind(create=create_hf, create_frozen=create_frozen_hf),
    "simulated": EngineKind(create=create_simulated),
    "vllm": EngineKind(create=create_vllm),
}


def engine_kind(name: str) -> EngineKind:
    """Look up an engine; an unknown name is the user's error and lists the known."""
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is unknown, known are: {', '.join(sorted(ENGINES))}")
    return ENGINES[name]
