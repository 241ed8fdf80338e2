"""Rules of a job whose agents have a pool of their own."""

from streamrl import names
from streamrl.spec.base import FieldRule

AGENT_RULES = (
    FieldRule(
        "task.agent.pool must be absent with trainer.clusterName: agents have no way to a scheduler in another cluster",
        "!has(self.trainer.clusterName) || !has(self.task.agent) || !has(self.task.agent.pool)",
        "{self.trainer.cluster_name}",
    ),
    FieldRule(
        f"name of generators must not be {names.AGENTS} beside task.agent.pool, which has that",
        f"!has(self.task.agent) || !has(self.task.agent.pool) || self.generators.all(g, g.name != '{names.AGENTS}')",
    ),
)
"""Where that pool may be, and what it is called."""
