"""Rules of a job with a side path."""

from streamrl.spec.base import FieldRule
from streamrl.spec.generators import GeneratorEngine

_ENGINES = GeneratorEngine.those(lambda engine: engine.side_path)

SHERL_RULES = (
    FieldRule(
        f"trainer.sherl needs engine {_ENGINES} in all generators: no other computes a side path",
        f"!has(self.trainer.sherl) || self.generators.all(g, {_ENGINES.cel('g.engine')})",
        "{g.engine.key}",
    ),
)
"""What goes with `trainer.sherl`."""
