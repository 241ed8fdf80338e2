"""What a run looks like from outside: the scheduler's numbers and the metrics files, read, never written."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl_cli.runner.folder import RunFolder

NUMBERS_TIMEOUT_S = 2.0
"""One read of the scheduler's numbers; a busy scheduler is asked again a second later."""
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""`http_proxy` of the environment is for the world outside, not for the loopback address."""
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


@dataclass(slots=True, kw_only=True)
class Progress:
    """State of a run as it is shown to people."""

    folder: RunFolder
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Line of `steps.jsonl` by step; a step trained again after a rollback replaces the first."""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    started_s: float = field(default_factory=time.monotonic)
    _readers: dict[str, LineReader] = field(default_factory=dict)

    async def refresh(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read what is new; returns the new step lines and the new evaluation lines."""
        steps, evaluations = list(self._read("steps.jsonl")), list(self._read("evaluations.jsonl"))
        self.steps.update((int(line["step"]), line) for line in steps)
        self.evaluations.update((int(line["step"]), line) for line in evaluations)
        self.numbers = await asyncio.to_thread(self._fetch_numbers)
        return steps, evaluations

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        reader = self._readers.setdefault(name, LineReader(path=self.folder.file(keys.DIR_METRICS, name)))
        return reader.new_lines()

    def _fetch_numbers(self) -> Mapping[str, Any]:
        endpoint = self.folder.file(keys.DIR_ENDPOINTS, "scheduler.json")
        try:
            address = json.loads(endpoint.read_text())["signals"]
            with _DIRECT.open(f"http://{address}/numbers", timeout=NUMBERS_TIMEOUT_S) as reply:
                return dict(json.load(reply))
        except (OSError, ValueError, KeyError, urllib.error.URLError):
            return self.numbers  # the scheduler is starting, restarting or gone: the last numbers stay

    @property
    def total_steps(self) -> int:
        """Steps that the job asks for."""
        return self.folder.job.spec.pipeline.steps

    @property
    def done_steps(self) -> int:
        """Steps taken."""
        return max(self.steps, default=-1) + 1

    def recent(self) -> list[dict[str, Any]]:
        """The last few steps, oldest first."""
        return [self.steps[step] for step in sorted(self.steps)[-RECENT_STEPS:]]

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
    return f"held-out reward at step {line['step']}: {result} ({line['prompts']} prompts)"


def bubble_shares(parts: Mapping[str, float], *, wall_s: float) -> dict[str, float]:
    """Shares of the wall by part, causes of `pipeline` put together."""
    shares = dict.fromkeys(("busy", "pipeline", "weights", "skew", "other"), 0.0)
    if wall_s <= 0:
        return shares
    for part, seconds in parts.items():
        shares[part.split("_", 1)[0]] += seconds / wall_s
    return shares
