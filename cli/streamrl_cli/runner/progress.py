"""What a run looks like from outside: the scheduler's numbers and the metrics files, read, never written."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl_cli.runner.folder import RunFolder
from streamrl_cli.runner.numbers_page import fetch_numbers

MOST_POINTS = 1000
"""Of a curve that is kept for the eyes: far more than a terminal is wide."""
RECENT_STEPS = 10
"""Speed and ETA are means over so many steps: long enough to be steady, short enough to follow."""


@dataclass(slots=True, kw_only=True)
class LineReader:
    """Follows a JSON-lines file: each call gives the whole lines that are new."""

    path: Path
    offset: int = 0

    def new_lines(self) -> Iterator[dict[str, Any]]:
        """Parsed lines since the last call; a line still being written waits for the next."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                with suppress(ValueError):  # half a line that a full disk left
                    yield json.loads(line)


@dataclass(slots=True)
class ThinnedCurve:
    """A number by step in bounded memory: means over equal ranges of steps, which widen as the run goes on.

    A step that is trained again after a rollback counts twice in its range's mean.
    """

    width: int = 1
    sums: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Range of steps -> sum and count."""

    def add(self, step: int, value: float) -> None:
        """Take the value of a step."""
        self._add(step // self.width, value, 1)
        if len(self.sums) > MOST_POINTS:
            self.width *= 2
            narrow, self.sums = self.sums, {}
            for index, (total, count) in narrow.items():
                self._add(index // 2, total, count)

    def means(self) -> list[float]:
        """The curve, by rising step."""
        return [total / count for _, (total, count) in sorted(self.sums.items())]

    def _add(self, index: int, total: float, count: int) -> None:
        before = self.sums.get(index, (0.0, 0))
        self.sums[index] = (before[0] + total, before[1] + count)


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of a run as it is shown to people."""

    folder: RunFolder
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last `RECENT_STEPS` lines of `steps.jsonl` by step; a step trained again after a rollback replaces the first."""
    rewards: ThinnedCurve = field(default_factory=ThinnedCurve)
    """Mean training reward."""
    score_failures: Counter[str] = field(default_factory=Counter)
    """Kind -> samples that got no reward, over all lines of `steps.jsonl`."""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    _readers: dict[str, LineReader] = field(default_factory=dict)

    async def refresh(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read what is new; returns the new step lines and the new evaluation lines."""
        steps, evaluations = list(self._read("steps.jsonl")), list(self._read("evaluations.jsonl"))
        for line in steps:
            self._take_step(line)
        self.evaluations.update((int(line["step"]), line) for line in evaluations)
        self.numbers = await fetch_numbers(self.folder) or self.numbers  # while there are none, the last ones stay
        return steps, evaluations

    def _take_step(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        self.steps[step] = line
        self.score_failures.update(line.get("score_failures", {}))
        self.rewards.add(step, float(line["reward_mean"]))
        if len(self.steps) > RECENT_STEPS:
            del self.steps[min(self.steps)]

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        reader = self._readers.setdefault(name, LineReader(path=self.folder.file(keys.DIR_METRICS, name)))
        return reader.new_lines()

    @property
    def total_steps(self) -> int:
        """Steps that the job asks for."""
        return self.folder.job.spec.pipeline.steps

    @property
    def done_steps(self) -> int:
        """Steps taken."""
        return max(self.steps, default=-1) + 1

    def replicas(self) -> dict[str, int]:
        """Pool -> generators that are connected."""
        connected = Counter(str(one["pool"]) for one in self.numbers.get("generators", ()))
        return {pool.name: connected[pool.name] for pool in self.folder.job.spec.generators}

    def recent(self) -> list[dict[str, Any]]:
        """The last few steps, oldest first."""
        return [self.steps[step] for step in sorted(self.steps)]

    def mean_recent(self, key: str) -> float | None:
        """Mean of a number over the last few steps."""
        values = [line[key] for line in self.recent() if line.get(key) is not None]
        return sum(values) / len(values) if values else None

    def eta_s(self) -> float | None:
        """Seconds until the last step at the recent speed."""
        recent = self.recent()
        if len(recent) < 2:  # noqa: PLR2004 - a speed needs two points
            return None
        pace_s = (recent[-1]["time_s"] - recent[0]["time_s"]) / (len(recent) - 1)
        return max(0.0, float(pace_s) * (self.total_steps - self.done_steps))


def format_seconds(seconds: float | None) -> str:
    """`1:05`, `2:03:04`, or a dash."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_number(value: float | None, *, digits: int = 3) -> str:
    """A number for the eyes, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def format_count(value: float | None) -> str:
    """`950`, `12.3k`, `4.5M`, or a dash."""
    if value is None:
        return "–"
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.1f}{suffix}"
    return f"{value:.0f}"


def held_out_text(line: Mapping[str, Any]) -> str:
    """An evaluation as a sentence."""
    reward = line["mean_reward"]
    result = "failed, nothing could be scored" if reward is None else format_number(reward)
    failed = f", {line['failed']} failed" if line.get("failed") and reward is not None else ""
    return f"held-out reward at step {line['step']}: {result} ({line['prompts']} prompts{failed})"


def failures_text(failures: Mapping[str, int]) -> str:
    """`12 scores failed: timeout`, or with the count of each kind where there are several; empty if none failed."""
    kinds = sorted((-count, kind) for kind, count in failures.items() if count)
    total = -sum(count for count, _ in kinds)
    names = [kind if len(kinds) == 1 else f"{kind} {-count}" for count, kind in kinds]
    return f"{total} score{'s' * (total != 1)} failed: {', '.join(names)}" if kinds else ""


def bubble_shares(parts: Mapping[str, float], *, wall_s: float) -> dict[str, float]:
    """Shares of the wall by part, causes of `pipeline` put together."""
    shares = dict.fromkeys(("busy", "pipeline", "weights", "skew", "other"), 0.0)
    if wall_s <= 0:
        return shares
    for part, seconds in parts.items():
        shares[part.split("_", 1)[0]] += seconds / wall_s
    return shares
