"""Rules of a job whose weights follow from the job alone."""

from streamrl.spec.base import rules_of
from streamrl.spec.generators import GeneratorEngine

_ALONE, _ALONE_CEL = GeneratorEngine.alone("g.engine")
_rule = rules_of(
    "pipeline.delivery Logical",
    others="self.pipeline.delivery != 'Logical'",
)

BY_NUMBER_RULES = (
    _rule(
        f"needs engine {_ALONE}: else the last digits of a log-prob follow from the batch",
        f"self.generators.all(g, {_ALONE_CEL})",
        "{g.engine.key}",
    ),
    _rule(
        "needs algorithm.dapo.dynamicSampling.maxDrawsPerStep 1: which groups are dropped follows from who comes first",
        "!has(self.algorithm.dapo) || self.algorithm.dapo.dynamicSampling.maxDrawsPerStep == 1",
    ),
    _rule(
        "goes without scheduling.rebalance: a sample that moves is computed otherwise",
        "!has(self.scheduling.rebalance)",
    ),
)
"""What goes with `pipeline.delivery: Logical`."""
