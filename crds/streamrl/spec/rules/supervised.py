"""Rules of a job whose samples are the data set's own answers, and of a job without generators."""

from streamrl.spec.base import FieldRule, rules_of
from streamrl.spec.training import TrainerEngine

_TRAINERS = TrainerEngine.those(lambda engine: engine.needs_model)
_TRAINERS_WITHOUT_MODEL = TrainerEngine.those(lambda engine: not engine.needs_model)
_rule = rules_of(
    "algorithm.supervised",
    others="!has(self.algorithm.supervised)",
)

SUPERVISED_RULES = (
    _rule("needs task.groupSize 1: each row is a group", "self.task.groupSize == 1", "{self.task.group_size}"),
    _rule(
        "needs pipeline.mode StreamSync: there is no generation to overlap with",
        "self.pipeline.mode == 'StreamSync'",
        "{self.pipeline.mode}",
    ),
    _rule(
        "needs task.sampling.temperature 1: its loss is that of the model as it is",
        "self.task.sampling.temperature == 1.0",
        "{self.task.sampling.temperature:g}",
    ),
    _rule(
        "goes without task.environment, task.agent and task.mixture: a row is one answer of one data set",
        "!has(self.task.environment) && !has(self.task.agent) && !has(self.task.mixture)",
    ),
    _rule(
        f"needs trainer.engine {_TRAINERS}: the {_TRAINERS_WITHOUT_MODEL} trainer has no tokenizer",
        _TRAINERS.cel("self.trainer.engine"),
    ),
    FieldRule(
        "task.groupSize must be at least 2: advantages are relative to the group; only algorithm.supervised takes 1",
        "self.task.groupSize > 1 || has(self.algorithm.supervised)",
    ),
    FieldRule(
        "generators must hold a pool: only algorithm.supervised trains without",
        "self.generators.size() > 0 || has(self.algorithm.supervised)",
    ),
    FieldRule(
        "task needs rewards, or mixture, where there are generators; only algorithm.distillation takes neither",
        "self.generators.size() == 0 || has(self.task.mixture) || self.task.rewards.size() > 0 || "
        "has(self.algorithm.distillation)",
    ),
    FieldRule(
        "task.rewards must be absent without generators: nobody makes what they would score",
        "self.generators.size() > 0 || self.task.rewards.size() == 0",
        lambda spec: ", ".join(reward.name for reward in spec.task.rewards),
    ),
    FieldRule(
        "scheduling.rebalance must be absent without generators",
        "self.generators.size() > 0 || !has(self.scheduling.rebalance)",
    ),
)
"""What goes with `algorithm.supervised`, and what has no meaning without generators."""
