"""Holds a run at a step that a test names, so that what the test does there is never too late.

The job's reward waits as long as so many steps are recorded. Groups that have their rewards by then are still trained: the run
comes at most `1 + staleness` steps further.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

_REWARD = """
import json, time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT, STEPS = HERE / "held_at", HERE / "run" / "metrics" / "steps.jsonl"

def score(*, prompt, completion, answer, metadata):
    while is_held():
        time.sleep(0.02)  # the test says when to go on
    return float(completion == answer)

def is_held():
    try:
        limit, lines = int(LIMIT.read_text()), STEPS.read_text().split("\\n")[:-1]
    except FileNotFoundError:
        return False
    return bool(lines) and json.loads(lines[-1])["step"] + 1 >= limit
"""


@dataclass(frozen=True, slots=True)
class Hold:
    """Of the run in the folder `base/run`."""

    base: Path

    @classmethod
    def on(cls, job: dict[str, Any], base: Path, *, step: int) -> "Hold":
        """Give the job the reward that waits."""
        (base / "held_reward.py").write_text(_REWARD)
        reward = {"name": "answer", "timeoutSeconds": 3600, "python": {"function": "held_reward:score"}}
        job["spec"]["task"]["rewards"] = [reward]
        hold = cls(base)
        hold.move(step)
        return hold

    def move(self, step: int) -> None:
        """Hold at this step from now on."""
        fresh = self.base / "held_at.new"
        fresh.write_text(str(step))
        fresh.rename(self.base / "held_at")

    def let_go(self) -> None:
        """The run goes on to its end."""
        (self.base / "held_at").unlink()
