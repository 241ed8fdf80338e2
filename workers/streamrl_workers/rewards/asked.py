"""Rewards that another decides: the data set (`verifier`), a function of the user's (`python`), the environment (`environment`)."""

from streamrl.proto.literals import unmarked
from streamrl.spec.base import PythonFunction
from streamrl.spec.tasks.rewards import EnvironmentReward, VerifierReward
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, load_function, make_extract

KEYWORDS = ("prompt", "completion", "answer", "metadata")


def verifier(options: VerifierReward, *, context: RewardContext) -> Scorer:
    """The data set's own verdict on the extracted answer; 0 where no answer is found."""
    extract = make_extract(options.answer_pattern, field=f"{context.field}.answerPattern")
    verify = context.verify

    def score(completion: str, item: Item) -> float:
        answer = extract(completion)
        return 0.0 if answer is None else verify(answer, item)

    return score


def python(options: PythonFunction, *, context: RewardContext) -> Scorer:
    """What the user's function says, `f(*, prompt, completion, answer, metadata) -> float`."""
    function = load_function(
        options.function, base_dir=context.base_dir, keywords=KEYWORDS, field=f"{context.field}.function"
    )

    def score(completion: str, item: Item) -> object:
        # A copy: items are kept between calls, and a function that changes its metadata must not change the item.
        metadata = dict(item.metadata)
        return function(prompt=unmarked(item.prompt), completion=completion, answer=item.answer, metadata=metadata)

    return score


def environment(options: EnvironmentReward, *, context: RewardContext) -> Scorer:
    """The sum of what the environment gave for the turns."""
    del options, context

    def score(completion: str, item: Item) -> object:
        del completion
        return item.environment_reward

    return score
