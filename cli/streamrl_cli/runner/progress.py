"""What a run looks like from outside: the scheduler's status endpoint and the metrics files, read, never written; and a line when nothing moves.

Owns what counts as progress: whatever goes beyond its highest so far (attempts, steps, checkpoints, evaluations, groups with
all their samples, tokens of running samples). What a process waits for is the part of its wall that grew most since there
was progress (`metrics/bubbles.py`). Nobody is ended for a stall.
"""

import asyncio
import ipaddress
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl import keys
from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl_cli.runner.folder import RunFolder
from streamrl_pages.http_fetch import FetchError, fetch
from streamrl_workers.metrics.jsonl import LineReader
from streamrl_workers.metrics.logprob_diff import new_warnings
from streamrl_workers.process.silences import PROCESS_FROZEN, Silence, silence_warnings

PARTS = ("busy", "pipeline", "weights", "skew", "other")
"""The parts that a wall is made of, in the order in which they are drawn."""
WAITS = {
    "no_samples": "the trainer waits for generation: more generators, or a larger maxStalenessSteps",
    "scoring": "finished samples wait for their rewards: a larger task.processes, or a faster reward",
    "due_group": "the trainer waits for one group that must come next: dispatch by length, or rebalancing",
    "staleness": "generators may not begin samples of an older version: fewer generators, or a larger maxStalenessSteps",
    "no_prompts": "no work is planned: a larger batchGroups",
    "back_pressure": "the scheduler takes no more samples: a faster trainer, or fewer generators",
    "phase": "generators and trainer share devices and take turns: another mode than Colocated",
}
"""Cause of `pipeline` -> what is waited for, and what helps."""
RECENT_STEPS = 10
"""Speed and ETA are means over so many steps: long enough to be steady, short enough to follow."""
STATUS_TIMEOUT_S = 2.0
"""One read of the scheduler's numbers; a busy scheduler is asked again a second later."""
_MOST_BYTES = 1 << 20
"""Of a page, as the operator reads it: it has some hundred bytes for each generator."""
TRACKER_DOWN = "TrackerDown"
"""Type of a warning of the status: a tracker's process is not there."""
STEPS_LONG = 3
"""A step may take so many times the usual before it is worth a line."""
_WHOLE = ("finished", "scored", "delivered", "consumed", "dropped")
"""States of groups with all their samples, and after."""
_LONGEST_GAP_S = 10.0
"""Between two looks: more has passed only if this process was stopped too."""


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """State of a run as it is shown to people."""

    folder: RunFolder
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last `RECENT_STEPS` lines of `steps.jsonl` by step; a step trained again after a rollback replaces the first."""
    rewards: "array[float]" = field(default_factory=lambda: array("d"))
    """Mean training reward of each line of `steps.jsonl`: eight bytes a step."""
    losses: "array[float]" = field(default_factory=lambda: array("d"))
    """The trainer's loss of each line, as far as it told one."""
    held_out_losses: "array[float]" = field(default_factory=lambda: array("d"))
    """Of a supervised run, as they were measured."""
    score_failures: Counter[str] = field(default_factory=Counter)
    """Kind -> samples that got no reward, over all lines of `steps.jsonl`."""
    score_errors: dict[str, str] = field(default_factory=dict)
    """Kind -> text of its first failure."""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    status: Mapping[str, Any] = field(default_factory=dict)
    _readers: dict[str, LineReader] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    """Warnings of trackers, and kinds of scores that failed."""
    silences: Mapping[str, Silence] | None = None
    """Newest notices of the run folder; None: the run's files are elsewhere."""
    _seen_silences: dict[str, Silence] = field(init=False)
    """Those that were announced, or are of an earlier life of the run."""

    def __post_init__(self) -> None:
        self._seen_silences = dict(self.folder.silences())

    async def refresh(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Read what is new; returns the new step lines and the new evaluation lines."""
        is_first = not self._readers
        steps, evaluations = list(self._read("steps.jsonl")), list(self._read("evaluations.jsonl"))
        for line in steps:
            self._take_step(line)
            if not is_first:  # of an earlier start, what raised may have been mended
                self._take_errors(line)
        self.evaluations.update((int(line["step"]), line) for line in evaluations)
        self.status = await fetch_status(self.folder) or self.status  # while there are none, the last ones stay
        self._take_errors(self.status)
        self.silences = self.folder.silences()
        return steps, evaluations

    def take_page(self, page: Mapping[str, Any]) -> None:
        """The same for a run whose files are elsewhere: a scheduler's page has its last step and its last evaluation."""
        self.status = page
        self._take_errors(page)
        step, evaluation = page.get("last_step"), page.get("last_evaluation")
        if step and step != self.steps.get(int(step["step"])):
            self._take_step(step)
        if evaluation:
            self.evaluations[int(evaluation["step"])] = evaluation

    def _take_step(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        self.steps[step] = line
        self.score_failures.update(line.get("score_failures", {}))
        self.rewards.append(line["reward_mean"])
        if (loss := line.get("trainer", {}).get("loss")) is not None:
            self.losses.append(loss)
        self.held_out_losses.extend(held_out_losses([line]))
        if len(self.steps) > RECENT_STEPS:
            del self.steps[min(self.steps)]

    def _take_errors(self, document: Mapping[str, Any]) -> None:
        for kind, text in document.get("score_errors", {}).items():
            self.score_errors.setdefault(kind, text)

    def _read(self, name: str) -> Iterator[dict[str, Any]]:
        reader = self._readers.setdefault(name, LineReader(path=self.folder.file(keys.DIR_METRICS, name)))
        return reader.new_lines()

    def tracker_warnings(self) -> Iterator[str]:
        """What is new about trackers that are down."""
        down = {one["message"] for one in self.status.get("warnings", ()) if one["type"] == TRACKER_DOWN}
        yield from (f"warning: {message}; the run goes on without it" for message in sorted(down - self._told))
        self._told |= down

    def score_error_lines(self) -> Iterator[str]:
        """Return the first failures of scores that are new since the last call."""
        for kind, text in self.score_errors.items():
            if kind not in self._told:
                self._told.add(kind)
                counts = Counter(self.status.get("score_failures", {})) | self.score_failures
                yield f"warning: {score_error_text(kind, text, count=counts[kind])}"

    def silence_lines(self) -> Iterator[str]:
        """Return the notices of silent processes that are new since the last call."""
        for process, one in self.folder.silences().items():
            if self._seen_silences.get(process) != one:
                self._seen_silences[process] = one
                yield f"warning: {one.message}" if one.holds else one.message

    def warnings(self, steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
        """What began with one of these steps and a person should look at."""
        bound = self.folder.job.spec.trainer.train_infer_logprob_diff
        for line in steps:
            for one in new_warnings(line, bound=bound):
                yield f"warning: step {line['step'] + 1}: {one.message}"

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
        connected = Counter(str(one["pool"]) for one in self.status.get("generators", ()))
        return {pool.name: connected[pool.name] for pool in self.folder.job.spec.generators}

    def recent(self) -> list[dict[str, Any]]:
        """The last few steps, oldest first."""
        return [self.steps[step] for step in sorted(self.steps)]

    def mean_recent(self, key: str) -> float | None:
        """Mean of a number over the last few steps."""
        values = [line[key] for line in self.recent() if line.get(key) is not None]
        return sum(values) / len(values) if values else None

    def loss(self) -> float | None:
        """Mean of the trainer's loss over the last few steps."""
        losses = self.losses[-RECENT_STEPS:]
        return sum(losses) / len(losses) if losses else None

    def step_s(self) -> float | None:
        """Seconds that a step takes, over the last few."""
        recent = self.recent()
        if len(recent) < 2:  # noqa: PLR2004 - a speed needs two points
            return None
        return float(recent[-1]["elapsed_s"] - recent[0]["elapsed_s"]) / (len(recent) - 1)

    def eta_s(self) -> float | None:
        """Seconds until the last step at the recent speed."""
        step_s = self.step_s()
        return None if step_s is None else max(0.0, step_s * (self.total_steps - self.done_steps))


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


def held_out_losses(steps: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of a supervised run, before its first step and behind each step that measured it."""
    told = [line.get("trainer", {}) for line in steps]
    found = [one.get(name) for one in told for name in ("initial_held_out_loss", "held_out_loss")]
    return [loss for loss in found if loss is not None]


def held_out_text(line: Mapping[str, Any]) -> str:
    """An evaluation as a sentence."""
    reward = line["mean_reward"]
    result = "failed, nothing could be scored" if reward is None else format_number(reward)
    sampled = "" if line.get("sampled_reward") is None else f", sampled {format_number(line['sampled_reward'])}"
    failed = f", {line['failed']} failed" if line.get("failed") and reward is not None else ""
    return f"held-out reward at step {line['step']}: {result}{sampled} ({line['prompts']} prompts{failed})"


def failures_text(failures: Mapping[str, int]) -> str:
    """`12 scores failed: timeout`, or with the count of each kind where there are several; empty if none failed."""
    kinds = sorted((-count, kind) for kind, count in failures.items() if count)
    total = -sum(count for count, _ in kinds)
    names = [kind if len(kinds) == 1 else f"{kind} {-count}" for count, kind in kinds]
    return f"{total} score{'s' * (total != 1)} failed: {', '.join(names)}" if kinds else ""


def score_error_text(kind: str, text: str, *, count: int) -> str:
    """`3 scores failed (raised), the first: right: raised KeyError: 'x' (mine.py, line 3)`."""
    return f"{max(count, 1)} score{'s' * (count > 1)} failed ({kind}), the first: {text}"


def bubble_shares(parts: Mapping[str, float], *, wall_s: float) -> dict[str, float]:
    """Shares of the wall by part, causes of `pipeline` put together."""
    shares = dict.fromkeys(PARTS, 0.0)
    if wall_s <= 0:
        return shares
    for part, seconds in parts.items():
        shares[part.split("_", 1)[0]] += seconds / wall_s
    return shares


def main_wait(parts: Mapping[str, float], *, wall_s: float) -> tuple[str, float]:
    """Return the largest cause of `pipeline` and its share of the wall; ("", 0): there is none."""
    causes = {part.removeprefix("pipeline_"): s for part, s in parts.items() if part.startswith("pipeline_") and s > 0}
    if not causes or wall_s <= 0:
        return "", 0.0
    most = max(causes, key=lambda cause: causes[cause])
    return most, causes[most] / wall_s


def warning_texts(status: Mapping[str, Any], *, silent: Mapping[str, Silence] | None) -> list[str]:
    """Return the messages of all warnings that hold.

    `silent`: newest notices of the run folder, which count more than the scheduler's page: it may be the silent one; None: the folder is elsewhere.
    """
    found = status.get("warnings", ())
    if silent is not None:
        found = [*(one for one in found if one.get("type") != PROCESS_FROZEN), *silence_warnings(silent.values())]
    counts, errors = (status.get(key, {}) for key in ("score_failures", "score_errors"))
    failed = [score_error_text(kind, text, count=counts.get(kind, 0)) for kind, text in errors.items()]
    return [*(str(one["message"]) for one in found), *failed]


async def fetch_status(folder: RunFolder) -> Mapping[str, Any] | None:
    """The page; None while the scheduler starts, restarts, is too busy to answer or is gone."""
    return await asyncio.to_thread(_fetch, folder)


def _fetch(folder: RunFolder) -> Mapping[str, Any] | None:
    address = signals_address(folder)
    return None if address is None else fetch_from(address)


def signals_address(folder: RunFolder) -> str | None:
    """host:port of the run's scheduler; None: there is none. A folder may be foreign: no other machine than this one is named."""
    try:
        address = read_json(folder.file(keys.DIR_ENDPOINTS, "scheduler.json"), beneath=folder.path)["signals"]
        host, _, port = address.rpartition(":")
        is_ours = ipaddress.ip_address(host.strip("[]")).is_loopback and port.isascii() and port.isdigit()
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return None
    return address if is_ours else None


def fetch_from(address: str) -> Mapping[str, Any] | None:
    """The page of the scheduler at host:port; None: there is none."""
    try:
        page = json.loads(fetch(address, "/numbers", timeout_s=STATUS_TIMEOUT_S, most_bytes=_MOST_BYTES))
    except (FetchError, ValueError, RecursionError):
        return None
    return page if isinstance(page, dict) else None


@dataclass(slots=True, kw_only=True)
class StallWatch:
    """Follows a run's status."""

    first_s: float
    """No progress for so long is worth a line; the next comes after twice the time."""
    looked_s: float
    """When it looked last, or the start."""
    _still_s: float = 0.0
    _told_s: float = 0.0
    """Silence at the last line."""
    _highest: dict[str, float] = field(default_factory=dict)
    _then: Mapping[str, Any] = field(default_factory=dict)
    """The numbers when there was progress last."""

    def look(self, status: Mapping[str, Any], *, now_s: float, step_s: float | None) -> str:
        """Take the newest status, and how long a step usually takes; the line to say now, "" if there is none."""
        passed_s, self.looked_s = min(now_s - self.looked_s, _LONGEST_GAP_S), now_s
        if self._has_moved(status):
            self._still_s = self._told_s = 0.0
            self._then = status
            return ""
        self._still_s += passed_s
        due_s = max(self.first_s, STEPS_LONG * (step_s or 0.0), 2 * self._told_s)
        if self._still_s < due_s:
            return ""
        self._told_s = self._still_s
        return f"no progress for {self._still_s:.0f} s, though every process is alive: {'; '.join(_waits(self._then, status))}"

    def _has_moved(self, status: Mapping[str, Any]) -> bool:
        moved = False
        for name, value in _counters(status):
            if value > self._highest.get(name, -1.0):
                self._highest[name], moved = value, True
        return moved


def _counters(status: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    if not status:
        return
    groups = status["groups"]
    yield "groups", sum(groups[state] for state in _WHOLE)
    yield "tokens", sum(one["tokens"] for one in status["generators"])
    for name in ("attempt", "step", "checkpoint_step"):
        yield name, status[name] or 0
    yield "evaluation", (status["last_evaluation"] or {}).get("step", -1)


def _waits(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What each process did since then, and where the groups are."""
    if not now:
        yield "the scheduler has not answered yet"
        return
    if now["trainer"] is None:
        yield "the trainer is not connected"
    if not now["generators"] and now.get("scaling", {}).get("pools") != {}:  # {}: the job has no pools
        yield "no generator is connected"
    before = {one["id"]: one["bubbles"] for one in processes(then)}
    for one in processes(now):
        name, parts = one["id"], one["bubbles"]
        grown = {part: seconds - before.get(name, {}).get(part, 0.0) for part, seconds in parts.items()}
        most = max(grown, key=lambda part: grown[part], default="other")
        yield (
            f"{name} waits ({most.removeprefix('pipeline_')})"
            if most.startswith("pipeline_")
            else f"{name} is at work ({most})"
        )
    groups = ", ".join(
        f"{count} {state}" for state, count in now["groups"].items() if count and state not in ("consumed", "dropped")
    )
    yield f"groups: {groups or 'none'}"


def processes(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What the status says of the trainer and each generator, as far as they are connected."""
    trainer = status.get("trainer")
    return [*([trainer] if trainer else []), *status.get("generators", ())]
