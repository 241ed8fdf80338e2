"""`exactMatch`: 1 if the extracted answer equals the reference after trimming both, else 0."""

from streamrl.spec.rewards import ExactMatchReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, make_extract


def create(options: ExactMatchReward, *, context: RewardContext) -> Scorer:
    """Scorer by equality."""
    extract = make_extract(options.answer_pattern, field=f"{context.field}.answerPattern")
    fold = str.casefold if options.ignore_case else str

    def score(completion: str, item: Item) -> float:
        if item.answer is None:
            raise ValueError("this item has no reference answer; use the reward verifier")
        answer = extract(completion)
        return float(answer is not None and fold(answer.strip()) == fold(item.answer.strip()))

    return score
