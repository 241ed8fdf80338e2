"""The runs of a folder: finds them, and keeps what was read of them as long as their files stay the same.

Owns no page. A run is named by a digest of its folder's name, so that no name of a folder is part of an address.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl import keys
from streamrl.errors import UserError, UserErrors
from streamrl_cli.reporting.data import RunData, cost, read_run, weighted_bubbles
from streamrl_cli.reporting.page import Figure, smooth, trace
from streamrl_cli.runner.folder import FILE_RUN, RunFolder, open_folder
from streamrl_cli.runner.progress import format_count, format_number

MOST_RUNS = 5_000
"""Of a folder: the newest; finding them takes some 30 µs each."""
_KEPT_LINES = 100
"""Five pages of runs."""
_KEPT_RUNS = 3
"""Runs that stay in memory whole, some 30 MB for 10,000 steps."""
_RECENT_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """A run beside others."""

    key: str
    name: str
    status: str
    steps: str
    held_out: str
    reward: str
    tokens_per_s: str
    cost: str
    bubbles: Mapping[str, float]
    rewards: Figure
    """The trace of its reward, without a name and a colour."""
    speeds: Figure
    spent: float
    fault: str = ""
    """Why nothing is known of it."""


class Catalog:
    """The runs of a folder, or the one run that it is. Used by several threads."""

    def __init__(self, root: Path) -> None:
        """Raises `UserError`: there is no such folder."""
        if not root.is_dir():
            raise UserError(field=str(root), rule="is not a folder", fix="name a run folder, or a folder that has some")
        self._root = root.resolve()
        self._lock = threading.Lock()
        self._whole: OrderedDict[str, tuple[str, RunData]] = OrderedDict()
        self._lines: OrderedDict[str, tuple[str, RunLine]] = OrderedDict()

    def paths(self) -> dict[str, Path]:
        """Key -> folder, the newest first."""
        root = self._root
        found = [root] if (root / FILE_RUN).is_file() else list(self._children())
        return {hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest(): path for path in found[:MOST_RUNS]}

    def _children(self) -> list[Path]:
        try:
            with os.scandir(self._root) as children:
                folders = [Path(one.path) for one in children if one.is_dir(follow_symlinks=False)]
            runs = [path for path in folders if (path / FILE_RUN).is_file()]
            return sorted(runs, key=lambda path: ((path / FILE_RUN).stat().st_mtime, path.name), reverse=True)
        except OSError as error:
            raise UserError(field=str(self._root), rule=f"cannot be read: {error.strerror}", fix="load again") from None

    def folder(self, key: str) -> RunFolder:
        """Of one run. Raises `UserError`: there is no such run, or it cannot be read."""
        path = self.paths().get(key)
        if path is None:
            raise UserError(field="run", rule="is not here any more", fix="go to the list of runs")
        return open_folder(path)

    def data(self, key: str) -> RunData:
        """All of a run but its samples. Raises `UserError`: as `folder`, or it has no steps yet."""
        folder = self.folder(key)
        stamp = stamp_of(folder.path)
        with self._lock:
            known = self._whole.get(key)
        if known is None or known[0] != stamp:
            known = stamp, read_run(folder.path, with_samples=False)
        with self._lock:
            self._whole[key] = known
            self._whole.move_to_end(key)
            while len(self._whole) > _KEPT_RUNS:
                self._whole.popitem(last=False)
        return known[1]

    def lines(self, runs: Mapping[str, Path]) -> Iterator[RunLine]:
        """Of some of `paths`; one that cannot be read says why."""
        for key, path in runs.items():
            stamp = stamp_of(path)
            with self._lock:
                known = self._lines.get(key)
            if known is None or known[0] != stamp:
                known = stamp, self._line(key, path)
                with self._lock:
                    self._lines[key] = known
                    while len(self._lines) > _KEPT_LINES:
                        self._lines.popitem(last=False)
            yield known[1]

    def _line(self, key: str, path: Path) -> RunLine:
        try:
            return _line_of(key, self.data(key))
        except (UserError, UserErrors) as error:
            empty = trace([], [], name="", colour="")
            blank: dict[str, Any] = dict.fromkeys(("steps", "held_out", "reward", "tokens_per_s", "cost"), "–")
            return RunLine(
                key=key,
                name=path.name,
                status="?",
                **blank,
                bubbles={},
                rewards=empty,
                speeds=empty,
                spent=0.0,
                fault=error.lines[0],
            )


def _line_of(key: str, run: RunData) -> RunLine:
    steps = [line["step"] + 1 for line in run.steps]
    recent = run.steps[-_RECENT_STEPS:]
    rates = [rate for line in recent if (rate := line.get("tokens_per_s")) is not None]
    held_out = [reward for line in run.evaluations if (reward := line["mean_reward"]) is not None]
    rewards = [line["reward_mean"] for line in run.steps]
    return RunLine(
        key=key,
        name=run.folder.name,
        status=run.result["status"] if run.result else "not ended",
        steps=f"{run.taken} / {run.folder.job.spec.pipeline.steps}",
        held_out=" → ".join(format_number(at, digits=2) for at in dict.fromkeys((held_out[0], held_out[-1])))
        if held_out
        else "–",
        reward=format_number(sum(line["reward_mean"] for line in recent) / len(recent) if recent else None),
        tokens_per_s=format_count(sum(rates) / len(rates) if rates else None),
        cost=f"{cost(run):.4g}",
        bubbles=weighted_bubbles(run),
        rewards=trace(steps, smooth(rewards), name="", colour=""),
        speeds=trace(steps, smooth([line.get("tokens_per_s") or 0.0 for line in run.steps]), name="", colour=""),
        spent=cost(run),
    )


def stamp_of(path: Path) -> str:
    """Another text when the numbers of a run have changed: a step, an evaluation, a change of size, its end."""
    names = (
        f"{keys.DIR_METRICS}/steps.jsonl",
        f"{keys.DIR_METRICS}/evaluations.jsonl",
        f"{keys.DIR_METRICS}/scaling.jsonl",
    )
    return " ".join(_sign(path / name) for name in (*names, keys.FILE_RESULT, keys.FILE_JOB))


def _sign(path: Path) -> str:
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return "-"
    return f"{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"
