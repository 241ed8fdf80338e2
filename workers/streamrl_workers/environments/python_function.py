"""`python`: an environment of the user's own, made by `f(*, question, answer, metadata, seed)`."""

from pathlib import Path

from streamrl.errors import shorten
from streamrl.spec.base import PythonFunction
from streamrl_workers.environments.base import Environment, MakeEnvironment
from streamrl_workers.rewards.base import Item, load_function
from streamrl_workers.rewards.registry import BadValueError

KEYWORDS = ("question", "answer", "metadata", "seed")


def create(options: PythonFunction, *, field: str, base_dir: Path) -> MakeEnvironment:
    """Maker that calls the user's function; `field`: path of the options in the job file."""
    function = load_function(options.function, base_dir=base_dir, keywords=KEYWORDS, field=f"{field}.function")

    def make(item: Item, seed: int) -> Environment:
        # A copy: items are kept between calls, and an environment that changes its metadata must not change the item.
        made = function(question=item.question, answer=item.answer, metadata=dict(item.metadata), seed=seed)
        if not callable(getattr(made, "step", None)):
            raise BadValueError(
                f"{options.function} must return an object with a method step, got {shorten(made)} ({type(made).__name__})"
            )
        return made  # type: ignore[no-any-return] # the user's own

    return make
