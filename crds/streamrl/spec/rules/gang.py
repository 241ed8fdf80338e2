"""Rules of a job whose pods are placed together."""

from streamrl.spec.base import FieldRule

GANG_RULES = (
    FieldRule(
        "gang goes without clusterName: no scheduler places pods of two clusters together",
        "!has(self.gang) || (!has(self.trainer.clusterName) && self.generators.all(g, !has(g.clusterName)))",
        lambda spec: next(
            filter(None, (spec.trainer.cluster_name, *(pool.cluster_name for pool in spec.generators))), ""
        ),
    ),
)
"""What goes with `gang`."""
