"""What the agent host and the scorers answer, as the pool takes it."""

from typing import Any

import pytest

from streamrl.spec.tasks.rewards import Reward
from streamrl_workers.stream.messages import PROMPT_BYTES
from streamrl_workers.tasks.protocol import agent_row, prompt_row, result_of
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Request, Score, ScoreSample
from streamrl_workers.tasks.worker_slots import endpoint_row

PROMPT = NeedPrompts(split="train", first_index=0, count=1)
TURN = PlayTurn(group_id=0, sample_index=0, lease=0, split="train", prompt_index=0, completions=("a",), last_token=0)
SCORE = ScoreSample(group_id=0, sample_index=0, split="train", prompt_index=0, completion="a")


@pytest.mark.parametrize(
    ("request_", "row"),
    [
        (PROMPT, ["\ud800", [None, ""], None]),
        (PROMPT, ["p", ["\ud800", ""], None]),
        (PROMPT, ["p"]),
        (PROMPT, 7),
        (TURN, {"kind": "raised", "error": "x" * 1001}),
        (TURN, ["", 0.0, True]),
        (TURN, ["", float("inf"), True, False]),
        (TURN, ["\ud800", 0.0, False, False]),
        (TURN, ["ü" * (PROMPT_BYTES // 2 + 1), 0.0, False, True]),
    ],
)
def test_an_answer_that_does_not_fit_fails_its_item_alone(request_: Request, row: Any) -> None:
    assert agent_row(request_, row)["kind"] == "bad_value"


def test_an_answer_that_fits_is_taken_as_it_is() -> None:
    for row in (["p", ["1", "{}"], None], ["p", [None, ""], None]):
        assert agent_row(PROMPT, row) == row
    for row in (
        ["", 1.0, True, False],
        {"kind": "raised", "error": "x" * 1000},
        ["ü" * (PROMPT_BYTES // 2), 0.0, False, True],
    ):
        assert agent_row(TURN, row) == row


def test_what_a_reward_sees_of_an_item_is_cut_where_it_is_very_long() -> None:
    row = prompt_row("p", answer="\ud800" * 20_000, metadata={"rows": ["ü" * 20_000], "odd": {1}})
    assert agent_row(PROMPT, row) == row
    _, (answer, metadata), _ = row
    assert (len(answer), answer[-2:], len(metadata)) == (16_384, "?…", 16_384)
    assert metadata.startswith('{"rows": ["ü')


def test_a_verifier_that_raised_is_counted_beside_an_endpoint() -> None:
    rewards = [
        Reward.model_validate({"name": "right", "weightPercent": 50, "verifier": {}}),
        Reward.model_validate({"name": "judge", "weightPercent": 50, "http": {"url": "http://judge/"}}),
    ]
    row = endpoint_row([1.0], values=[0.0, None], raised="right: the verifier raised")
    score = result_of(SCORE, row, rewards=rewards)
    assert isinstance(score, Score)
    assert (score.reward, score.kind, score.error) == (0.5, "verifier_raised", "right: the verifier raised")
    assert score.parts == {"right": 0.0, "judge": 1.0}
