"""Programs of real packages, unchanged, in the real task pool: each hears and says what its package makes of it, and earns its reward.

They run by the interpreter of `.venv-agents`, where those packages are.
"""

import json
from pathlib import Path

import pytest

from streamrl.keys import ENV_MODEL_PATH
from support.agent_pools import begun
from support.agent_programs import EXAMPLES, PROGRAM_S, PROGRAMS, PYTHON
from support.chat_models import END, TOOL_TEMPLATE, chat_tokenizer, save_tokenizer
from support.task_pools import running_pool

QUESTION = "How many apples do Ann and Bob have"
NOTES = ["Ann has 3 apples", "Bob has 4 apples", "Cid has 9 apples"]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def heard(*results: str) -> str:
    """Behind a turn that has ended with its end token."""
    said = "".join(f"<|im_start|>user\n<tool_response>{result}</tool_response><|im_end|>\n" for result in results)
    return f"\n{said}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("apples.py", "7"),
        ("apples.py", "8"),
        *((program, "7") for program in PROGRAMS),
        *(pytest.param(program, "8", marks=pytest.mark.soak) for program in PROGRAMS),
    ],
)
async def test_plays_an_item_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, answer: str
) -> None:
    monkeypatch.setenv(ENV_MODEL_PATH, save_tokenizer(tmp_path / "model", template=TOOL_TEMPLATE))
    items = [{"prompt": f"{QUESTION}, {number}?", "answer": "7", "notes": NOTES} for number in range(20)]
    (tmp_path / "items.jsonl").write_text("".join(f"{json.dumps(item)}\n" for item in items))
    async with running_pool(
        EXAMPLES,
        modules={},
        dataset={"jsonl": {"path": str(tmp_path / "items.jsonl")}},
        rewards=[{"name": "game", "environment": {}}],
        agent={
            "command": [str(PYTHON), *program.split()],
            "timeoutSeconds": PROGRAM_S,
            "sessionsPerProgram": 8 if program == "apples.py" else None,
        },
        chat={},
    ) as pool:
        sample = await begun(pool)
        sample.end = chat_tokenizer().convert_tokens_to_ids(END)
        assert '"name": "search"' in sample.prompt
        assert f"<|im_start|>user\n{QUESTION}, " in sample.prompt
        turn = await sample.say(call("search", query="Ann") + call("search", query="Bob"))
        assert (turn.observation, turn.error) == (heard(*NOTES[:2]), "")
        turn = await sample.say("I add. " + call("calculate", expression="3+4"))
        assert (turn.observation, turn.error) == (heard("7"), "")
        last = await sample.say(answer)
        assert (last.reward, last.done, last.error) == (float(answer == "7"), True, "")
