"""A run that goes no further than its test has seen: a reward that waits, so that no run ends before the test has done what it is about."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.runs import wait_for

REWARD = {"name": "answer", "timeoutSeconds": 3600.0, "python": {"function": "gate:score"}}
"""The job's only reward."""
_LIMIT, _SCORED = "gate-limit", "gate-scored"
_CODE = f'''
import pathlib, time

HERE = pathlib.Path(__file__).parent

def score(*, prompt, completion, answer, metadata):
    """One for the right answer. A sample behind those that were let through waits."""
    with (HERE / "{_SCORED}").open("a") as scored:
        scored.write("x")
        scored.flush()
        number = scored.tell()
    while number > int((HERE / "{_LIMIT}").read_text()):
        time.sleep(0.01)
    return float(completion == answer)
'''
_MORE = 8
"""Samples let through at once: half a step of `simulated_job`."""
_ALL = 10**9


@dataclass(frozen=True, slots=True)
class Gate:
    """What is behind `REWARD`."""

    folder: Path

    @classmethod
    def shut(cls, folder: Path) -> "Gate":
        """In the folder of the job's code."""
        (folder / "gate.py").write_text(_CODE)
        (folder / _SCORED).touch()
        gate = cls(folder)
        gate.let(0)
        return gate

    def until(self, holds: Callable[[], Any], *, what: str) -> None:
        """Let samples through, a few at a time, until something holds. The trainer follows by the job's staleness at most."""

        def look() -> bool:
            if holds():
                return True
            if self.scored > int((self.folder / _LIMIT).read_text()):
                self.let(self.scored + _MORE)
            return False

        wait_for(look, what=what)

    @property
    def scored(self) -> int:
        """Samples that are through, or wait."""
        return (self.folder / _SCORED).stat().st_size

    def open(self) -> None:
        """Let all through."""
        self.let(_ALL)

    def let(self, samples: int) -> None:
        """So many through in all."""
        new = self.folder / f"{_LIMIT}.new"
        new.write_text(str(samples))
        new.replace(self.folder / _LIMIT)
