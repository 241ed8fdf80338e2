"""Rules of a job whose weights follow from the job alone."""

from streamrl.spec.base import rules_of
from streamrl.spec.generators import GeneratorEngine

_ALONE, _ALONE_CEL = GeneratorEngine.alone("g.engine")
_rule = rules_of(
    "pipeline.delivery Logical",
    others="self.pipeline.delivery != 'Logical'",
    applies=lambda spec: spec.pipeline.delivery == "Logical",
)

BY_NUMBER_RULES = (
    _rule(
        f"needs engine {_ALONE}: else the last digits of a log-prob follow from the batch",
        f"self.generators.all(g, {_ALONE_CEL})",
        lambda spec: ", ".join(pool.engine.key for pool in spec.generators if not pool.engine.common.computes_alone),
    ),
    _rule(
        "needs algorithm.dapo.dynamicSampling.maxDrawsPerStep 1: which groups are dropped follows from who comes first",
        "!has(self.algorithm.dapo) || self.algorithm.dapo.dynamicSampling.maxDrawsPerStep == 1",
        lambda spec: spec.algorithm.dapo and spec.algorithm.dapo.dynamic_sampling.max_draws_per_step > 1,
    ),
    _rule(
        "goes without scheduling.rebalance: a sample that moves is computed otherwise",
        "!has(self.scheduling.rebalance)",
        lambda spec: spec.scheduling.rebalance is not None,
    ),
)
"""What goes with `pipeline.delivery: Logical`."""
