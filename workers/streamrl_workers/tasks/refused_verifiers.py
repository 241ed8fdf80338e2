"""Data sets of reasoning-gym whose own verifier cannot be a reward, by name and with the reason.

A test holds the table against the installed package: the right answer of every other data set scores 1, and no wrong answer does.
"""

from collections.abc import Iterator

from streamrl.errors import UserError
from streamrl.spec.task import SingleTask

REFUSED: dict[str, tuple[str, str]] = {
    "complex_arithmetic": ("scores the answer nan as right", "use exactMatch"),
    "composite": ("has none of its own, and a job cannot give it data sets", "list them in spec.task.mixture"),
    "game_of_life_halting": ("scores every answer as True", "use exactMatch"),
}
"""Name -> what its verifier does, what to do instead."""


def refused_verifiers(task: SingleTask) -> Iterator[UserError]:
    """Find the rewards of a task that ask such a verifier."""
    dataset = task.dataset.reasoning_gym
    if dataset is None or dataset.name not in REFUSED:
        return
    why, fix = REFUSED[dataset.name]
    for number, reward in enumerate(task.rewards):
        if reward.verifier is not None:
            rule = f"the verifier of {dataset.name} {why}"
            yield UserError(field=f"{task.field}.rewards[{number}].verifier", rule=rule, fix=fix)
