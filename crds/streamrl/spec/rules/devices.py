"""Rules of pools that work on the trainer's devices."""

from streamrl.spec.base import FieldRule

DEVICE_RULES = (
    FieldRule(
        "devices of generators must not all be Trainer but with mode Colocated: add a pool that generates while it trains",
        "self.generators.size() == 0 || self.pipeline.mode == 'Colocated' || "
        "self.generators.exists(g, (!has(g.devices) || g.devices == 'Own') && "
        "(!has(self.trainer.reference) || g.name != self.trainer.reference.pool))",
        "{self.pipeline.mode}",
    ),
    FieldRule(
        "devices of generators must not be Own with mode Colocated: all are on the trainer's; leave it out",
        "self.pipeline.mode != 'Colocated' || self.generators.all(g, !has(g.devices) || g.devices == 'Trainer')",
        "{g.name}",
    ),
)
"""What is asked of pools by whose devices they have."""
