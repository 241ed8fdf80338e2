"""What an environment is, and what it may answer.

Owns the types and the check of an answer. The user writes `f(*, question, answer, metadata, seed) -> environment`; the
environment has one method, `step(completion) -> (observation, reward, done)`. It may raise or hang: the process that
calls it is watched from outside.

Invariant that the user keeps: an environment is a function of its item, its seed and the completions so far. So it can
be made again in any process by playing the same completions (docs/decisions/0008-environments.md).
"""

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from streamrl.errors import shorten
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.registry import BadValueError

ANSWER_KEYS = ("observation", "reward", "done")


class Environment(Protocol):
    """One game, tool session or simulation."""

    def step(self, completion: str, /) -> object:
        """The answer to a turn of the model: (observation, reward, done) as a tuple, a mapping or an object."""


MakeEnvironment = Callable[[Item, int], Environment]
"""(item, seed) -> an environment at its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentContext:
    """What an environment is made from, beside its own options."""

    field: str
    """Path of the options in the job file, for errors."""
    base_dir: Path
    """Where the user's modules lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an environment says to one turn."""

    observation: str
    """What the model reads before its next turn; without meaning where `done`."""
    reward: float
    done: bool


def checked(value: object) -> Answer:
    """The answer that `step` returned; raises `BadValueError` for anything else."""
    observation, reward, done = _parts(value)
    if not isinstance(observation, str):
        raise BadValueError(f"observation must be a string, got {_shown(observation)}")
    if not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise BadValueError(f"reward must be a finite number, got {_shown(reward)}")
    if done is not True and done is not False and done not in (0, 1):
        raise BadValueError(f"done must be True or False, got {_shown(done)}")
    return Answer(observation=_encodable(observation), reward=float(reward), done=bool(done))


def _parts(value: object) -> tuple[Any, Any, Any]:
    if isinstance(value, tuple | list) and len(value) == len(ANSWER_KEYS):
        return value[0], value[1], value[2]
    if isinstance(value, Mapping) and all(key in value for key in ANSWER_KEYS):
        return value["observation"], value["reward"], value["done"]
    if all(hasattr(value, key) for key in ANSWER_KEYS):
        observation, reward, done = (getattr(value, key) for key in ANSWER_KEYS)
        return observation, reward, done
    raise BadValueError(f"step must return (observation, reward, done), got {_shown(value)}")


def _encodable(text: str) -> str:
    """Without lone surrogates, which no message can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _shown(value: object) -> str:
    return f"{shorten(value)} ({type(value).__name__})"
