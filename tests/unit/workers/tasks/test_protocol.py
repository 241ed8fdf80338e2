"""What the agent host answers, as the pool takes it."""

from typing import Any

import pytest

from streamrl_workers.stream.messages import PROMPT_BYTES
from streamrl_workers.tasks.protocol import agent_row
from streamrl_workers.tasks.values import NeedPrompts, PlayTurn, Request

PROMPT = NeedPrompts(split="train", first_index=0, count=1)
TURN = PlayTurn(group_id=0, sample_index=0, lease=0, split="train", prompt_index=0, completions=("a",), last_token=0)


@pytest.mark.parametrize(
    ("request_", "row"),
    [
        (PROMPT, ["\ud800"]),
        (PROMPT, 7),
        (TURN, ["", 0.0, True]),
        (TURN, ["", float("inf"), True, False]),
        (TURN, ["\ud800", 0.0, False, False]),
        (TURN, ["ü" * (PROMPT_BYTES // 2 + 1), 0.0, False, True]),
    ],
)
def test_an_answer_that_does_not_fit_fails_its_item_alone(request_: Request, row: Any) -> None:
    assert agent_row(request_, row)["kind"] == "bad_value"


def test_an_answer_that_fits_is_taken_as_it_is() -> None:
    assert agent_row(PROMPT, ["p"]) == ["p"]
    for row in (["", 1.0, True, False], ["ü" * (PROMPT_BYTES // 2), 0.0, False, True]):
        assert agent_row(TURN, row) == row
