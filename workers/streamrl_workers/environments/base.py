"""What an environment is, what it may answer, and the player that answers turns with it.

The user writes `f(*, question, answer, metadata, seed) -> environment`; the environment has one method,
`step(completion) -> (observation, reward, done)`. It may raise or hang: the process that calls it is watched from outside,
and `entering` is called before each call of the user's code, from where its time counts.

Owns the live environments of one process, the least recently used of them up to `MAX_LIVE`. Invariants:
- The user keeps this one: an environment is a function of its item, its seed and the completions so far. Where no live one has
  played exactly these completions (another process, a killed one, a forgotten one) a new one plays them all again
  (docs/decisions/0008-environments.md).
- An environment that failed is not used again.
"""

import hashlib
import json
import math
import numbers
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from streamrl.errors import shorten
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.registry import BadValueError

RESULT_KEYS = ("observation", "reward", "done")


class Environment(Protocol):
    """One game, tool session or simulation."""

    def step(self, completion: str, /) -> object:
        """The answer to a turn of the model: (observation, reward, done) as a tuple, a mapping or an object."""


MakeEnvironment = Callable[[Item, int], Environment]
"""(item, seed) -> an environment at its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What an environment says to one turn."""

    observation: str
    """What the model reads before its next turn; without meaning where `done`."""
    reward: float
    done: bool
    context: bool = False
    """The observation is the prompt of a new context (an agent's): the model sees nothing of what was before."""


def checked(value: object) -> StepResult:
    """The answer that `step` returned; raises `BadValueError` for anything else."""
    observation, reward, done = _parts(value)
    if not isinstance(observation, str):
        raise BadValueError(f"observation must be a string, got {_shown(observation)}")
    if not (isinstance(reward, numbers.Real) and math.isfinite(reward)):
        raise BadValueError(f"reward must be a finite number, got {_shown(reward)}")
    if done is not True and done is not False and done not in (0, 1):
        raise BadValueError(f"done must be True or False, got {_shown(done)}")
    return StepResult(observation=_encodable(observation), reward=float(reward), done=bool(done))


def _parts(value: object) -> tuple[Any, Any, Any]:
    if isinstance(value, tuple | list) and len(value) == len(RESULT_KEYS):
        return value[0], value[1], value[2]
    if isinstance(value, Mapping) and all(key in value for key in RESULT_KEYS):
        return value["observation"], value["reward"], value["done"]
    if all(hasattr(value, key) for key in RESULT_KEYS):
        observation, reward, done = (getattr(value, key) for key in RESULT_KEYS)
        return observation, reward, done
    raise BadValueError(f"step must return (observation, reward, done), got {_shown(value)}")


def _encodable(text: str) -> str:
    """Without lone surrogates, which no message can carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _shown(value: object) -> str:
    return f"{shorten(value)} ({type(value).__name__})"


MAX_LIVE = 1024
"""Environments kept in one process: about the samples that are under way; one that fell out costs a replay."""

Key = tuple[int, int]
"""Group, sample."""


def item_seed(job_seed: int, *, split: str, index: int) -> int:
    """Seed of an item's environment, 63 bits: all samples of an item, in every evaluation, play the same game."""
    digest = hashlib.blake2b(f"{job_seed}/{split}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSource:
    """What the environments of a job are made of."""

    make: MakeEnvironment
    seed: int
    """The job's."""
    max_observation_chars: int
    """Longer observations are cut."""
    max_turns: int
    """After so many turns a sample ends, whatever the environment says."""


class Player:
    """Answers turns."""

    def __init__(self, source: EnvironmentSource, *, entering: Callable[[], None], max_live: int = MAX_LIVE) -> None:
        self._source = source
        self._entering = entering
        self._max_live = max_live
        self._live: OrderedDict[Key, tuple[bytes, Environment]] = OrderedDict()
        self.replayed = 0
        """Turns played again."""

    def play(self, item: Item, *, split: str, index: int, key: Key, completions: Sequence[str]) -> StepResult:
        """The answer to the last of `completions` (at least one) by the environment of item `index` of a split.

        `key` names the sample. The observation is cut to the job's bound.

        Raises `BadValueError`, or whatever the user's code raises.
        """
        before = completions[:-1]
        seed = item_seed(self._source.seed, split=split, index=index)
        environment = self._find(key, before) or self._replay(item, seed=seed, completions=before)
        answer = self._step(environment, completions[-1])
        if not answer.done and len(completions) < self._source.max_turns:
            self._keep(key, completions, environment)
        return replace(answer, observation=answer.observation[: self._source.max_observation_chars])

    def forget(self) -> bool:
        """Let all live environments go; whether there were any."""
        had = bool(self._live)
        self._live.clear()
        return had

    def _find(self, key: Key, completions: Sequence[str]) -> Environment | None:
        found = self._live.pop(key, None)
        return found[1] if found is not None and found[0] == digest_of(completions) else None

    def _keep(self, key: Key, completions: Sequence[str], environment: Environment) -> None:
        self._live[key] = (digest_of(completions), environment)
        if len(self._live) > self._max_live:
            self._live.popitem(last=False)

    def _replay(self, item: Item, *, seed: int, completions: Sequence[str]) -> Environment:
        self._entering()
        environment = self._source.make(item, seed)
        for turn, completion in enumerate(completions, start=1):
            self.replayed += 1
            if self._step(environment, completion).done:
                raise BadValueError(
                    f"made again, it ended at turn {turn} of {len(completions)}, which it had not done before; "
                    "it must depend on its item, its seed and the completions alone"
                )
        return environment

    def _step(self, environment: Environment, completion: str) -> StepResult:
        self._entering()
        return checked(environment.step(completion))


def digest_of(completions: Sequence[str]) -> bytes:
    """Tells sequences of turns apart."""
    return hashlib.blake2b(json.dumps(list(completions)).encode(), digest_size=16).digest()
