"""GRPO done right (arXiv 2503.20783, section 3.2): without the length and difficulty biases.

    A_i = R_i - mean(R)                                    no division by the group's deviation
    loss = (1 / (samples x maxTokens)) sum_i sum_t L_it    no division by a sequence's length

The constant is that of the paper's code (`masked_sum` over the generation budget): groupSize x batchGroups x `maxTokens`
of the sampling, whatever lengths came out. L is GRPO's.
"""

from streamrl_workers.trainer.algorithms.grpo import GroupSurrogate


class DrGrpo(GroupSurrogate):
    """The algorithm with the job's constants."""

    aggregation = "FixedLength"
