"""Runs of scenarios, each once: the simulator behind one door, with what is read from a run.

Owns the table of results by scenario, in a file of the checkout if wanted (`--resume`). Does not own scenarios.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from streamrl_cli.simulation.reading import parse_scenario
from streamrl_cli.simulation.results import summary
from streamrl_cli.simulation.world import simulate


def simulated(document: Mapping[str, Any]) -> dict[str, Any]:
    """What `results.summary` gives of a scenario."""
    return summary(simulate(parse_scenario(document)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run gave."""

    ends_s: Sequence[float]
    """When each step was recorded."""
    makespans_s: Sequence[float]
    sizes: Sequence[Mapping[str, Any]]
    """Changes of pools' sizes."""

    def step_s(self, *, skip: int = 1) -> float:
        """Mean time of a step after the first so many."""
        return (self.ends_s[-1] - self.ends_s[skip - 1]) / (len(self.ends_s) - skip)

    def makespan_s(self, *, skip: int = 1) -> float:
        """Mean makespan of generation after the first so many."""
        return fmean(self.makespans_s[skip:])


class Results:
    """Runs by their scenario."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: a file of earlier results, which also takes the new ones."""
        self._path = path
        self.runs = 0
        self._known: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._known = json.loads(path.read_text(encoding="utf-8"))

    def run(self, document: Mapping[str, Any]) -> Run:
        """Simulate, unless it is known."""
        key = sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:24]
        if key not in self._known:
            found = simulated(document)
            rows = found["by_step"]
            steps = [sum(row["at_s"] <= size["at_s"] for row in rows) for size in found["sizes"]]
            self._known[key] = {
                "ends_s": [row["at_s"] for row in rows],
                "makespans_s": [row["makespan_s"] for row in rows],
                "sizes": [size | {"step": step} for size, step in zip(found["sizes"], steps, strict=True)],
            }
            self.runs += 1
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps(self._known), encoding="utf-8")
        return Run(**self._known[key])


RESULTS = Results()
"""Of this process; `command.py` may set another one before the first run."""


def run(document: Mapping[str, Any]) -> Run:
    """Simulate a scenario, unless it is known."""
    return RESULTS.run(document)


def resume(path: Path) -> None:
    """Take earlier results from a file, and keep new ones there."""
    global RESULTS  # noqa: PLW0603 - one table for the process
    RESULTS = Results(path)
