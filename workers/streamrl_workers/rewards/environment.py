"""`environment`: the sum of what the environment gave for the turns."""

from streamrl.spec.rewards import EnvironmentReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer


def create(options: EnvironmentReward, *, context: RewardContext) -> Scorer:
    """Scorer that passes the environment's reward on."""
    del options, context

    def score(completion: str, item: Item) -> object:
        del completion
        return item.environment_reward

    return score
