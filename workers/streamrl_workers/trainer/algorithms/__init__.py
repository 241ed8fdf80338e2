"""The algorithms by name, as in `algorithm` of an RLJob.

An algorithm is a class, most in a file of their own. It is imported when a job asks for it: the simulated trainer never loads torch.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec, SpecModel
from streamrl_workers.plugins.load import load_at

if TYPE_CHECKING:
    from streamrl_workers.trainer.algorithms.algorithm import Algorithm

ALGORITHMS: dict[str, str] = {
    "grpo": "grpo.Grpo",
    "drGrpo": "grpo.DrGrpo",
    "dapo": "dapo.Dapo",
    "rloo": "rloo.Rloo",
    "reinforcePP": "reinforce_pp.ReinforcePlusPlus",
    "ppo": "ppo.Ppo",
    "gspo": "gspo.Gspo",
    "trajectoryBalance": "tba.Tba",
    "archer": "archer.Archer",
    "distillation": "distillation.Distillation",
    "supervised": "supervised.Supervised",
}
"""Name in an RLJob -> module of this folder and class."""
IQL = "iql.Iql"
"""In the place of `supervised` where that has a critic."""


def algorithm_class(name: str) -> "type[Algorithm]":
    """Look up an algorithm; an unknown name lists the known."""
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm {name!r} is unknown, known are: {', '.join(sorted(ALGORITHMS))}")
    return _class_at(ALGORITHMS[name])


def _class_at(place: str) -> "type[Algorithm]":
    module, _, class_name = place.partition(".")
    found: type[Algorithm] = getattr(import_module(f"{__name__}.{module}"), class_name)
    return found


def create_algorithm(spec: RLJobSpec, *, plugin_dir: Path | None = None) -> "Algorithm":
    """The job's algorithm, with the job's constants; `plugin_dir`: as `directory` of `load_plugin`."""
    from streamrl_workers.trainer.algorithms.algorithm import AlgorithmSetup
    from streamrl_workers.trainer.algorithms.corrections import SampleCorrection, create_correction, create_mask

    algorithm = spec.algorithm
    kind: Callable[[AlgorithmSetup], Algorithm]
    options: SpecModel
    if (logged := algorithm.supervised and algorithm.supervised.critic) is not None:
        kind, options = _class_at(IQL), logged
    elif (plugin := load_at(spec, "algorithm.python", directory=plugin_dir)) is not None:
        kind, options = plugin.made_by, plugin.options
    else:
        kind, options = algorithm_class(algorithm.key), algorithm.value
    corrects = load_at(spec, "algorithm.correction.python", directory=plugin_dir)
    own: SampleCorrection | None = None if corrects is None else corrects.make()
    advantage = load_at(spec, "algorithm.advantage.python", directory=plugin_dir)
    made = kind(
        AlgorithmSetup(
            spec=options,
            correction=own or create_correction(algorithm.correction),
            mask=create_mask(algorithm.correction) if own is None else own.mask,
            max_tokens=spec.task.sampling.max_tokens,
            advantage=None if advantage is None else advantage.make(),
        )
    )
    if advantage is not None and made.needs != "group":
        rule = "goes with algorithms that derive from GroupAlgorithm"
        raise UserError(field="spec.algorithm.advantage", rule=rule, got=type(made).__name__)
    return made
