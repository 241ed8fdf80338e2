"""`verifier`: the data set's own verdict on the extracted answer; 0 where no answer is found."""

from streamrl.spec.rewards import VerifierReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, make_extract


def create(options: VerifierReward, *, context: RewardContext) -> Scorer:
    """Scorer that asks the data set."""
    extract = make_extract(options.answer_pattern, field=f"{context.field}.answerPattern")
    verify = context.verify

    def score(completion: str, item: Item) -> float:
        answer = extract(completion)
        return 0.0 if answer is None else verify(answer, item)

    return score
