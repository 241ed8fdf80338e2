"""The learning rules by name, as in `algorithm` of an RLJob.

Creators import their rule when called: the simulated trainer never loads torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl_workers.trainer.algorithms.rule import Algorithm


def create_grpo(spec: Any) -> "Algorithm":  # noqa: ANN401 - the member's own model, `streamrl.spec.training.Grpo`
    """Group relative policy optimisation."""
    from streamrl_workers.trainer.algorithms.grpo import GroupRelative

    return GroupRelative(spec)


ALGORITHMS: dict[str, Callable[[Any], "Algorithm"]] = {"grpo": create_grpo}


def algorithm_creator(name: str) -> "Callable[[Any], Algorithm]":
    """Look up an algorithm; an unknown name lists the known."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is unknown, known are: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]
