"""`reasoningGym`: the procedural data sets of reasoning-gym; endless, with their own verifiers.

Owns how an item is addressed and which questions are held out. Invariants:
- An item follows from (seed, split, index) alone. reasoning-gym draws item i of seed s from `Random(s + i)`, so
  neighbouring seeds would share items; here each address is a hash, and two seeds give unrelated streams.
- A question belongs to one split by the hash of its text, the same for every seed: one in `HELD_OUT_ONE_IN` is held out.
  Separate seeds would not do: easy data sets have few questions (a sum of two digits: 200), so streams meet.
  An item takes the first address of its own sequence whose question belongs to its split.
Held-out items can repeat where the data set has few questions.
"""

import difflib
import json
import math
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from streamrl.errors import UserError
from streamrl.spec.task import SingleTask
from streamrl.spec.tasks.datasets import ReasoningGymDataset
from streamrl_workers.rewards.base import Item, VerifierRaisedError
from streamrl_workers.tasks.questions import Question, hash_of
from streamrl_workers.tasks.values import Split

HELD_OUT_ONE_IN = 5
"""A held-out item takes five draws on average; more held back would make slow data sets slower to evaluate."""
MAX_DRAWS = 500
"""No question of the split in so many draws (chance 1e-48 if there are enough): the data set has too few questions."""
ADDRESS_LIMIT = 2**31
"""Some data sets seed numpy with it, which takes 32 bits."""

FIELD = "spec.task.dataset.reasoningGym"
REFUSED_VERIFIERS: dict[str, tuple[str, str]] = {
    "complex_arithmetic": ("scores the answer nan as right", "use exactMatch"),
    "composite": ("has none of its own, and a job cannot give it data sets", "list them in spec.task.mixture"),
    "game_of_life_halting": ("scores every answer as True", "use exactMatch"),
}
"""Name -> what its verifier does, what to do instead. A test holds it against all verifiers of the package."""


def split_of(question: str) -> Split:
    """The split that a question belongs to."""
    return "held_out" if hash_of(question) % HELD_OUT_ONE_IN == 0 else "train"


def refused_verifiers(task: SingleTask) -> Iterator[UserError]:
    """Find the rewards of a task that ask such a verifier."""
    dataset = task.dataset.reasoning_gym
    if dataset is None or dataset.name not in REFUSED_VERIFIERS:
        return
    why, fix = REFUSED_VERIFIERS[dataset.name]
    for number, reward in enumerate(task.rewards):
        if reward.verifier is not None:
            rule = f"the verifier of {dataset.name} {why}"
            yield UserError(field=f"{task.field}.rewards[{number}].verifier", rule=rule, fix=fix)


def open_procedural(options: ReasoningGymDataset, *, seed: int) -> "ProceduralSource":
    """Open a data set by name. Raises `UserError` for an unknown name or parameters that it refuses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in a dependency, seen at its first import
        import reasoning_gym  # noqa: F401 - registers the data sets
        from reasoning_gym.factory import DATASETS
    if options.name not in DATASETS:
        close = difflib.get_close_matches(options.name, DATASETS, n=3, cutoff=0.5)
        fix = f"did you mean {' or '.join(close)}?" if close else "reasoning-gym's gallery lists the names"
        raise UserError(field=f"{FIELD}.name", rule="must be a data set of reasoning-gym", got=options.name, fix=fix)
    for name in ("seed", "size"):
        if name in options.parameters:
            raise UserError(
                field=f"{FIELD}.parameters.{name}", rule="is set by the job", fix="remove it; spec.seed is the seed"
            )
    return ProceduralSource(_Drawer(options), seed=seed)


class _Drawer:
    """Gives the entry at an address; knows what reasoning-gym needs for it."""

    def __init__(self, options: ReasoningGymDataset) -> None:
        self._options = options
        self._dataset = self._make(seed=0)
        self._reseed = not self._takes_any_index()

    def _make(self, *, seed: int) -> Any:  # noqa: ANN401 - reasoning-gym ships no types
        from reasoning_gym.factory import create_dataset

        try:
            return create_dataset(self._options.name, seed=seed, size=1, **self._options.parameters)
        except Exception as error:
            raise _bad_parameters(self._options, error) from error

    def _takes_any_index(self) -> bool:
        # Most data sets seed by index and take any; a few fill a table of `size` rows when they are made.
        try:
            self._dataset[ADDRESS_LIMIT - 1]
        except IndexError:
            return False
        except Exception as error:
            raise _bad_parameters(self._options, error) from error
        return True

    @property
    def name(self) -> str:
        """Of the data set."""
        return self._options.name

    @property
    def data(self) -> str:
        """What entries follow from beside their address."""
        parameters = json.dumps(self._options.parameters, sort_keys=True)
        return f"{self.name} {parameters} of reasoning-gym {version('reasoning-gym')}"

    def entry(self, address: int) -> dict[str, Any]:
        """The entry at an address below `ADDRESS_LIMIT`."""
        dataset, index = (self._make(seed=address), 0) if self._reseed else (self._dataset, address)
        entry: dict[str, Any] = dataset[index]
        return entry

    def score(self, answer: str, entry: dict[str, Any]) -> float:
        """The data set's own verdict."""
        return float(self._dataset.score_answer(answer=answer, entry=entry))


def _bad_parameters(options: ReasoningGymDataset, error: Exception) -> UserError:
    text = " ".join(str(error).split()).removeprefix(f"{options.name}.") or "no reason given"
    return UserError(
        field=f"{FIELD}.parameters",
        rule=f"{options.name} refuses them: {type(error).__name__}: {text}",
        got=options.parameters,
    )


class ProceduralSource:
    """A data set of reasoning-gym, split by question."""

    held_out_size = train_size = None

    def __init__(self, drawer: _Drawer, *, seed: int) -> None:
        self._drawer = drawer
        self._seed = seed
        self.data = drawer.data

    def question(self, split: Split, index: int) -> Question:
        """Question `index` of a split."""
        for draw in range(MAX_DRAWS):
            address = hash_of(f"{self._seed}/{split}/{index}/{draw}") % ADDRESS_LIMIT
            entry = self._drawer.entry(address)
            if split_of(entry["question"]) == split:
                return Question(
                    question=entry["question"],
                    answer=entry["answer"] if isinstance(entry["answer"], str) else None,
                    metadata=entry.get("metadata", {}),
                    source_index=address,
                )
        raise UserError(
            field=f"{FIELD}.parameters",
            rule=f"give too few different questions: none of {MAX_DRAWS} belongs to the split {split}",
            fix="widen them",
        )

    def place(self, source_index: int) -> str:
        """Where a person finds the item."""
        return f"entry {source_index} of {self._drawer.name}"

    def verify(self, answer: str, item: Item) -> float:
        """The data set's own verdict; entries are made again for it as reasoning-gym made them.

        Raises `VerifierRaisedError` for an answer at which its code raises, or gives no finite number.
        """
        entry = {"question": item.question, "answer": item.answer, "metadata": dict(item.metadata)}
        try:
            score = self._drawer.score(answer, entry)
        except MemoryError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise VerifierRaisedError(f"the verifier of {self._drawer.name} raised {text}") from error
        if not math.isfinite(score):
            raise VerifierRaisedError(f"the verifier of {self._drawer.name} gave {score}")
        return score
