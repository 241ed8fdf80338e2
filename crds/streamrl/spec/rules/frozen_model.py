"""Rules of a job with a pool for the frozen model."""

from streamrl.spec.algorithm import KL_ALGORITHMS
from streamrl.spec.base import rules_of
from streamrl.spec.generators import GeneratorEngine

_ENGINES = GeneratorEngine.those(lambda engine: engine.scores_frozen)
_rule = rules_of(
    "trainer.reference",
    others="!has(self.trainer.reference)",
)

FROZEN_MODEL_RULES = (
    _rule(
        "needs a frozen model: algorithm distillation or trajectoryBalance, or a referenceKl",
        " || ".join(
            [
                "has(self.algorithm.distillation) || has(self.algorithm.trajectoryBalance)",
                *(f"(has(self.algorithm.{key}) && has(self.algorithm.{key}.referenceKl))" for key in KL_ALGORITHMS),
            ]
        ),
        "{self.algorithm.key}",
    ),
    _rule(
        "must name one of several pools: the others generate",
        "self.generators.size() > 1 && self.generators.exists(g, g.name == self.trainer.reference.pool)",
        "{self.trainer.reference.pool}",
    ),
    _rule(
        f"needs a pool with engine {_ENGINES}, without scaling auto, weightCache and devices Trainer",
        "!self.generators.exists(g, g.name == self.trainer.reference.pool && "
        f"(!{_ENGINES.cel('g.engine')} || (has(g.scaling) && has(g.scaling.auto)) || has(g.weightCache) || (has(g.devices) && g.devices == 'Trainer')))",
        "{self.trainer.reference.pool}",
    ),
    _rule(
        "goes without pipeline.mode Colocated: its pool works while the others generate",
        "self.pipeline.mode != 'Colocated'",
    ),
    _rule(
        "goes without storage.checkpoints.weightsFrom, but with algorithm distillation: its pool cannot reach that model",
        "!has(self.storage.checkpoints.weightsFrom) || has(self.algorithm.distillation)",
    ),
)
"""What goes with a pool for the frozen model."""
