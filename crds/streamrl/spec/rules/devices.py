"""Rules of pools that work on the trainer's devices."""

from streamrl.spec.base import FieldRule

DEVICE_RULES = (
    FieldRule(
        "devices of generators must not all be Trainer but with mode Colocated: add a pool that generates while it trains",
        "self.generators.size() == 0 || self.pipeline.mode == 'Colocated' || "
        "self.generators.exists(g, (!has(g.devices) || g.devices == 'Own') && "
        "(!has(self.trainer.reference) || g.name != self.trainer.reference.pool))",
        lambda spec: (
            spec.pipeline.mode != "Colocated"
            and spec.generators
            and all(pool is spec.frozen_pool or pool.devices == "Trainer" for pool in spec.generators)
            and spec.pipeline.mode
        ),
    ),
    FieldRule(
        "devices of generators must not be Own with mode Colocated: all are on the trainer's; leave it out",
        "self.pipeline.mode != 'Colocated' || self.generators.all(g, !has(g.devices) || g.devices == 'Trainer')",
        lambda spec: (
            spec.pipeline.mode == "Colocated"
            and ", ".join(pool.name for pool in spec.generators if pool.devices == "Own")
        ),
    ),
)
"""What is asked of pools by whose devices they have."""
