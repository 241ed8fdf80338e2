"""Rules of a job with a pool for the frozen model."""

from streamrl.spec.algorithm import KL_ALGORITHMS
from streamrl.spec.base import rules_of
from streamrl.spec.generators import GeneratorEngine, GeneratorPool

_ENGINES = GeneratorEngine.those(lambda engine: engine.scores_frozen)
_rule = rules_of(
    "trainer.reference",
    others="!has(self.trainer.reference)",
    applies=lambda spec: spec.trainer.reference is not None,
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
        lambda spec: getattr(spec.algorithm.value, "reference_kl", None) is None and spec.algorithm.key,
    ),
    _rule(
        "must name one of several pools: the others generate",
        "self.generators.size() > 1 && self.generators.exists(g, g.name == self.trainer.reference.pool)",
        lambda spec: (
            (spec.frozen_pool is None or len(spec.generators) == 1)
            and spec.trainer.reference is not None
            and spec.trainer.reference.pool
        ),
    ),
    _rule(
        f"needs a pool with engine {_ENGINES}, without scaling auto, weightCache and devices Trainer",
        "!self.generators.exists(g, g.name == self.trainer.reference.pool && "
        f"(!{_ENGINES.cel('g.engine')} || has(g.scaling.auto) || has(g.weightCache) || (has(g.devices) && g.devices == 'Trainer')))",
        lambda spec: spec.frozen_pool is not None and not _may_be_frozen(spec.frozen_pool) and spec.frozen_pool.name,
    ),
    _rule(
        "goes without pipeline.mode Colocated: its pool works while the others generate",
        "self.pipeline.mode != 'Colocated'",
        lambda spec: spec.pipeline.mode == "Colocated",
    ),
    _rule(
        "goes without storage.checkpoints.weightsFrom, but with algorithm distillation: its pool cannot reach that model",
        "!has(self.storage.checkpoints.weightsFrom) || has(self.algorithm.distillation)",
        lambda spec: spec.storage.checkpoints.weights_from is not None and spec.algorithm.teacher is None,
    ),
)
"""What goes with a pool for the frozen model."""


def _may_be_frozen(pool: GeneratorPool) -> bool:
    return (
        pool.engine.common.scores_frozen
        and pool.scaling.auto is None
        and pool.weight_cache is None
        and pool.devices != "Trainer"
    )
