"""The environments by the key that users write; `open_environment` is the door."""

from collections.abc import Callable
from pathlib import Path

from streamrl.errors import shorten
from streamrl.spec.base import PythonFunction
from streamrl.spec.task import EnvironmentSpec
from streamrl_workers.environments.base import Environment, EnvironmentSource, MakeEnvironment
from streamrl_workers.rewards.base import Item, load_function
from streamrl_workers.rewards.registry import BadValueError

KEYWORDS = ("question", "answer", "metadata", "seed")


def python_environment(options: PythonFunction, *, field: str, base_dir: Path) -> MakeEnvironment:
    """`python`, an environment of the user's own: maker that calls the user's function; `field`: path of the options in the job file."""
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


ENVIRONMENTS: dict[str, Callable[..., MakeEnvironment]] = {"python": python_environment}


def open_environment(spec: EnvironmentSpec | None, *, seed: int, base_dir: Path) -> EnvironmentSource | None:
    """The environment of a job with this seed; None if it has none. Raises `UserError` for a bad function."""
    if spec is None:
        return None
    make = ENVIRONMENTS[spec.key](spec.value, field=f"spec.task.environment.{spec.key}", base_dir=base_dir)
    return EnvironmentSource(
        make=make, seed=seed, max_observation_chars=spec.max_observation_chars, max_turns=spec.max_turns
    )
