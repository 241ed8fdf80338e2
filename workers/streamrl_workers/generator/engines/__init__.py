"""The engines by name, as in `generators[].engine` of an RLJob.

Creators import their engine when called: the simulated engine never loads torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from streamrl_workers.generator.engine import Engine

if TYPE_CHECKING:
    from streamrl.spec.generators import SimulatedEngine as SimulatedSpec


def create_hf(
    *,
    model_path: str,
    slots: int,
    max_total_tokens: int | None,
    threads: int | None,
    add_special_tokens: bool = True,
    precision: Literal["FP32", "BF16"] = "FP32",
) -> Engine:
    """Build the transformers engine.

    Args:
        model_path: folder or hub name.
        slots: samples at a time.
        max_total_tokens: prompt and completion together; None = what the model has positions for.
        threads: of torch; None = torch's choice.
        add_special_tokens: to prompts.
        precision: format of the weights, as the trainer publishes them.
    """
    from streamrl_workers.generator.engines.hf.create import create

    return create(
        model_path=model_path,
        slots=slots,
        max_total_tokens=max_total_tokens,
        threads=threads,
        add_special_tokens=add_special_tokens,
        precision=precision,
    )


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
