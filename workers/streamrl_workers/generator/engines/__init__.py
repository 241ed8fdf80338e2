"""The engines by name, as in `generators[].engine` of an RLJob.

Creators import their engine when called: the simulated engine never loads torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from streamrl_workers.generator.engine import Engine

if TYPE_CHECKING:
    from streamrl.spec.generators import SimulatedEngine as SimulatedSpec


def create_hf(*, model_path: str, slots: int, max_total_tokens: int | None, threads: int | None) -> Engine:
    """Build the transformers engine. `threads`: torch threads, None = torch's choice."""
    from streamrl_workers.generator.engines.hf.create import create

    return create(model_path=model_path, slots=slots, max_total_tokens=max_total_tokens, threads=threads)


def create_simulated(*, spec: "SimulatedSpec", slots: int, seed: int) -> Engine:
    """Build the engine that only takes time."""
    from streamrl_workers.generator.engines.simulated import SimulatedEngine

    return SimulatedEngine(spec=spec, slots=slots, seed=seed)


ENGINES: dict[str, Callable[..., Engine]] = {"hf": create_hf, "simulated": create_simulated}


def engine_creator(name: str) -> Callable[..., Engine]:
    """Look up an engine; an unknown name is the user's error and lists the known."""
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is unknown, known are: {', '.join(sorted(ENGINES))}")
    return ENGINES[name]
