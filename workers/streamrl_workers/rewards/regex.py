"""`regex`: 1 if the pattern is found anywhere in the completion, else 0."""

from streamrl.spec.rewards import RegexReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, compile_pattern


def create(options: RegexReward, *, context: RewardContext) -> Scorer:
    """Scorer by a search."""
    search = compile_pattern(options.pattern, field=f"{context.field}.pattern").search

    def score(completion: str, item: Item) -> float:
        del item  # the pattern alone decides
        return float(search(completion) is not None)

    return score
