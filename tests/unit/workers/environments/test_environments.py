"""Environments: what they may answer, and that a replay equals the game it repeats."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.spec.task import EnvironmentSpec
from streamrl_workers.environments.base import EnvironmentSource, Player, StepResult, checked, item_seed
from streamrl_workers.environments.registry import open_environment
from streamrl_workers.rewards.base import Item
from streamrl_workers.rewards.registry import BadValueError

ITEM = Item(prompt="p", target="", question="q", answer="a", metadata={"level": 1}, source_index=0)


class Stepped(NamedTuple):
    observation: str
    reward: float
    done: bool


@pytest.mark.parametrize(
    "value",
    [
        ("o", 0.5, False),
        ["o", 0.5, False],
        {"observation": "o", "reward": 0.5, "done": False, "info": object()},
        Stepped("o", 0.5, done=False),
        SimpleNamespace(observation="o", reward=0.5, done=0),
    ],
)
def test_every_shape_of_an_answer(value: object) -> None:
    assert checked(value) == StepResult(observation="o", reward=0.5, done=False)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, r"step must return \(observation, reward, done\), got None"),
        (("o", 0.5), "step must return"),
        ({"observation": "o"}, "step must return"),
        ("abc", "step must return"),
        ((1, 0.5, False), "observation must be a string, got 1"),
        ((b"o", 0.5, False), "observation must be a string"),
        (("o", float("nan"), False), "reward must be a finite number"),
        (("o", "1", False), "reward must be a finite number, got '1'"),
        (("o", 0.5, "no"), "done must be True or False, got 'no'"),
        (("o", 0.5, None), "done must be True or False"),
    ],
)
def test_nonsense_is_named(value: object, says: str) -> None:
    with pytest.raises(BadValueError, match=says):
        checked(value)


def test_what_no_message_can_carry_is_replaced() -> None:
    assert checked(("a\udc80b", 0, False)).observation == "a?b"


class Diary:
    """Answers with its seed and all it has heard; ends at the fifth turn, or when told."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.heard: list[str] = []

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.heard.append(completion)
        observation = f"{self.random.random()} {'/'.join(self.heard)}"
        return observation, self.random.random(), completion == "end" or len(self.heard) == 5


def make(item: Item, seed: int) -> Diary:
    return Diary(seed)


def player(*, max_live: int = 100, limit_chars: int = 1000) -> Player:
    source = EnvironmentSource(make=make, seed=3, max_observation_chars=limit_chars, max_turns=8)
    return Player(source, entering=lambda: None, max_live=max_live)


def play(who: Player, completions: list[str], *, sample: int = 0, index: int = 0) -> StepResult:
    return who.play(ITEM, split="train", index=index, key=(index, sample), completions=completions)


WORDS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4)


@given(games=st.lists(WORDS, min_size=1, max_size=6), data=st.data())
def test_a_replay_equals_the_game_whoever_plays_it_and_in_whatever_order(
    games: list[list[str]], data: st.DataObject
) -> None:
    """Turns of several samples, mixed; each goes to any of two players with room for one game each."""
    reference, players = player(), [player(max_live=1), player(max_live=1)]
    turns = dict.fromkeys(range(len(games)), 1)
    while waiting := [sample for sample, turn in turns.items() if turn <= len(games[sample])]:
        sample = data.draw(st.sampled_from(waiting))
        said = games[sample][: turns[sample]]
        who = data.draw(st.sampled_from(players))
        assert play(who, said, sample=sample) == play(reference, said, sample=sample)
        turns[sample] += 1
    assert reference.replayed == 0


def test_a_live_environment_is_not_made_again() -> None:
    who = player()
    for turn in range(1, 5):
        play(who, ["a"] * turn)
    assert who.replayed == 0


def test_an_environment_of_which_no_turn_is_left_is_let_go() -> None:
    alive: list[weakref.ref[Diary]] = []

    def watched(item: Item, seed: int) -> Diary:
        diary = make(item, seed)
        alive.append(weakref.ref(diary))
        return diary

    source = EnvironmentSource(make=watched, seed=3, max_observation_chars=1000, max_turns=2)
    who = Player(source, entering=lambda: None)
    assert not play(who, ["one"]).done
    assert alive[0]() is not None
    assert not play(who, ["one", "two"]).done
    assert alive[0]() is None


def test_another_history_under_the_same_name_is_played_again() -> None:
    """A group that is generated again says other things."""
    who = player()
    play(who, ["a"])
    assert play(who, ["b", "c"]) == play(player(), ["b", "c"])
    assert who.replayed == 1


def test_one_item_is_one_game_for_all_its_samples_and_another_item_another() -> None:
    who = player()
    assert play(who, ["a"], sample=0) == play(who, ["a"], sample=1)
    assert play(who, ["a"], index=0) != play(who, ["a"], index=1)
    assert item_seed(0, split="train", index=1) != item_seed(0, split="held_out", index=1)


def test_long_observations_are_cut() -> None:
    assert len(play(player(limit_chars=7), ["a" * 100]).observation) == 7


def test_each_call_of_the_users_code_is_announced() -> None:
    calls: list[int] = []
    source = EnvironmentSource(make=make, seed=3, max_observation_chars=9, max_turns=8)
    who = Player(source, entering=lambda: calls.append(1))
    play(who, ["a", "b", "c"])
    assert len(calls) == 4, "one to make it, one for each turn"
    play(who, ["a", "b", "c", "d"])
    assert len(calls) == 5


def test_an_environment_that_ends_only_when_made_again_is_refused() -> None:
    with pytest.raises(BadValueError, match="it ended at turn 2 of 3"):
        play(player(), ["a", "end", "c", "d"])


@dataclass
class Fails:
    """Fails at the word, and remembers that it was called."""

    calls: int = 0

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.calls += 1
        if completion == "fail":
            raise RuntimeError("no")
        return str(self.calls), 0.0, False


def test_an_environment_that_failed_is_not_used_again() -> None:
    source = EnvironmentSource(make=lambda item, seed: Fails(), seed=3, max_observation_chars=9, max_turns=8)
    who = Player(source, entering=lambda: None)
    play(who, ["a"])
    with pytest.raises(RuntimeError):
        play(who, ["a", "fail"])
    assert play(who, ["a", "b"]).observation == "2"
    assert who.replayed == 1


MODULE = """
class Env:
    def __init__(self, text): self.text = text
    def step(self, completion): return self.text + completion, 1, True

def make(*, question, answer, metadata, seed):
    metadata["level"] = 9
    return Env(f"{question}{answer}{seed}")

def bare(*, question, answer, metadata, seed):
    return "no environment"

def few(*, question):
    return Env("")
"""


def spec(function: str) -> EnvironmentSpec:
    return EnvironmentSpec.model_validate({"python": {"function": f"user_envs:{function}"}})


@pytest.fixture
def base_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "user_envs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def opened(function: str, base_dir: Path) -> Player:
    source = open_environment(spec(function), seed=3, base_dir=base_dir)
    assert source is not None
    return Player(source, entering=lambda: None)


def test_a_function_of_the_users_own(base_dir: Path) -> None:
    seed = item_seed(3, split="train", index=0)
    assert play(opened("make", base_dir), ["x"]) == StepResult(observation=f"qa{seed}x", reward=1.0, done=True)
    metadata: Mapping[str, Any] = ITEM.metadata
    assert metadata["level"] == 1


def test_a_function_that_makes_no_environment(base_dir: Path) -> None:
    with pytest.raises(BadValueError, match="user_envs:bare must return an object with a method step"):
        play(opened("bare", base_dir), ["x"])


def test_a_function_with_other_arguments_is_the_users_error(base_dir: Path) -> None:
    with pytest.raises(UserError, match=r"spec.task.environment.python.function: is called with the keywords question"):
        opened("few", base_dir)


def test_a_job_without_environment(base_dir: Path) -> None:
    assert open_environment(None, seed=3, base_dir=base_dir) is None
