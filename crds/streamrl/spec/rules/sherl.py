"""Rules of a job with a side path."""

from streamrl.spec.base import FieldRule
from streamrl.spec.generators import GeneratorEngine

_ENGINES = GeneratorEngine.those(lambda engine: engine.side_path)

SHERL_RULES = (
    FieldRule(
        f"trainer.sherl needs engine {_ENGINES} in all generators: no other computes a side path",
        f"!has(self.trainer.sherl) || self.generators.all(g, {_ENGINES.cel('g.engine')})",
        lambda spec: (
            spec.trainer.sherl is not None
            and ", ".join(pool.engine.key for pool in spec.generators if not pool.engine.common.side_path)
        ),
    ),
)
"""What goes with `trainer.sherl`."""
