"""The learning rules by name, as in `algorithm` of an RLJob.

Creators import their rule when called: the simulated trainer never loads torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrl.spec import RLJobSpec

if TYPE_CHECKING:
    from streamrl_workers.trainer.algorithms.corrections import Corrector
    from streamrl_workers.trainer.algorithms.rule import Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSetup:
    """What a rule is built from."""

    spec: Any  # the member's own model, as `streamrl.spec.training.Grpo`
    correction: "Corrector"
    max_tokens: int  # of one turn of the model


def create_grpo(setup: RuleSetup) -> "Rule":
    """Group relative policy optimisation."""
    from streamrl_workers.trainer.algorithms.grpo import GroupRelative

    return GroupRelative(setup.spec, correction=setup.correction)


def create_dr_grpo(setup: RuleSetup) -> "Rule":
    """GRPO without its length and difficulty biases."""
    from streamrl_workers.trainer.algorithms.dr_grpo import DoneRight

    return DoneRight(setup.spec, correction=setup.correction)


def create_dapo(setup: RuleSetup) -> "Rule":
    """Clip-higher, token-level loss, overlong punishment."""
    from streamrl_workers.trainer.algorithms.dapo import DecoupledClip

    return DecoupledClip(setup.spec, correction=setup.correction, max_tokens=setup.max_tokens)


def create_rloo(setup: RuleSetup) -> "Rule":
    """REINFORCE with a leave-one-out baseline."""
    from streamrl_workers.trainer.algorithms.rloo import LeaveOneOut

    return LeaveOneOut(setup.spec, correction=setup.correction)


def create_reinforce_pp(setup: RuleSetup) -> "Rule":
    """REINFORCE with batch-normalised advantages."""
    from streamrl_workers.trainer.algorithms.reinforce_pp import BatchNormalised

    return BatchNormalised(setup.spec, correction=setup.correction)


def create_ppo(setup: RuleSetup) -> "Rule":
    """Proximal policy optimisation with a critic."""
    from streamrl_workers.trainer.algorithms.ppo import Proximal

    return Proximal(setup.spec, correction=setup.correction)


def create_gspo(setup: RuleSetup) -> "Rule":
    """Sequence-level ratios."""
    from streamrl_workers.trainer.algorithms.gspo import SequenceRatio

    return SequenceRatio(setup.spec, correction=setup.correction)


ALGORITHMS: dict[str, Callable[[RuleSetup], "Rule"]] = {
    "grpo": create_grpo,
    "drGrpo": create_dr_grpo,
    "dapo": create_dapo,
    "rloo": create_rloo,
    "reinforcePP": create_reinforce_pp,
    "ppo": create_ppo,
    "gspo": create_gspo,
}


def algorithm_creator(name: str) -> "Callable[[RuleSetup], Rule]":
    """Look up an algorithm; an unknown name lists the known."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is unknown, known are: {', '.join(sorted(ALGORITHMS))}")
    return ALGORITHMS[name]


def create_algorithm(spec: RLJobSpec) -> "Rule":
    """The job's rule, with the job's constants."""
    from streamrl_workers.trainer.algorithms.corrections import create_correction

    algorithm = spec.algorithm
    setup = RuleSetup(
        spec=algorithm.value,
        correction=create_correction(algorithm.correction),
        max_tokens=spec.task.sampling.max_tokens,
    )
    return algorithm_creator(algorithm.key)(setup)
