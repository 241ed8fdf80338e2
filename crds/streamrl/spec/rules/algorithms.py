"""Rules of jobs whose algorithm asks something of the task."""

from streamrl.spec.base import FieldRule

ALGORITHM_RULES = (
    FieldRule(
        "algorithm.trajectoryBalance.replay must be absent with task.environment, task.agent or task.mixture: its samples are told apart by their prompts",
        "!has(self.algorithm.trajectoryBalance) || !has(self.algorithm.trajectoryBalance.replay) || "
        "!(has(self.task.environment) || has(self.task.agent) || has(self.task.mixture))",
    ),
    FieldRule(
        "algorithm.archer needs task.environment or task.agent, and no task.mixture: its critic is of turns",
        "!has(self.algorithm.archer) || has(self.task.environment) || has(self.task.agent)",
    ),
    FieldRule(
        "algorithm.dapo.overlong must be absent where a task of task.mixture has maxTokens: it counts from sampling.maxTokens",
        "!has(self.algorithm.dapo) || !has(self.algorithm.dapo.overlong) || !has(self.task.mixture) || "
        "self.task.mixture.all(t, !has(t.maxTokens))",
        "{t.name}",
    ),
)
"""What goes with `trajectoryBalance`, `archer` and `dapo`."""
