"""`python`: a function of the user's own, `f(*, prompt, completion, answer, metadata) -> float`."""

from streamrl.spec.base import PythonFunction
from streamrl_workers.rewards.base import Item, RewardContext, Scorer, load_function

KEYWORDS = ("prompt", "completion", "answer", "metadata")


def create(options: PythonFunction, *, context: RewardContext) -> Scorer:
    """Scorer that calls the user's function."""
    function = load_function(
        options.function, base_dir=context.base_dir, keywords=KEYWORDS, field=f"{context.field}.function"
    )

    def score(completion: str, item: Item) -> object:
        # A copy: items are kept between calls, and a function that changes its metadata must not change the item.
        metadata = dict(item.metadata)
        return function(prompt=item.prompt, completion=completion, answer=item.answer, metadata=metadata)

    return score
