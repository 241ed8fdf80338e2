"""What a line of the run's metrics becomes in a tracker. The names are part of the public face (`docs/trackers.md`).

    train/<name>            a line of `steps.jsonl`, and what the trainer says of the step
    train/pool/<pool>/<lag>/<name>    the same of the samples of one pool and version lag
    train/reward/<part>     parts of the reward, <task>/<part> of a mixture;  train/dropped/<reason>, train/score_failures/<kind>: counts
    train/task/<task>/<name>    a task of a mixture; eval/task/<task>/<name>: its held-out prompts
    bubbles/<role>/<part>   shares of the wall over the last heartbeats: of the trainer, and of the generators together
    cost/total, cost/<pool> since the run began; cost/trainer
    eval/<name>             a line of `evaluations.jsonl`

Pure. A value that is no finite number is left out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl_workers.trackers.registry import ScalarPoint

_GROUPS = {"reward_parts": "reward", "dropped": "dropped", "score_failures": "score_failures"}
"""Tables in a line of a step -> what stands between `train/` and their keys."""
_NOT_VALUES = ("step", "time_s")
_ODD = re.compile(r"[^A-Za-z0-9_./-]+")
"""What not every tracker takes in a name."""


def step_point(line: Mapping[str, Any]) -> ScalarPoint:
    """Of a line of `steps.jsonl`: step k is told at k + 1, the steps behind the weights that it made."""
    values = {
        **_numbers("train", {_named(key): one for key, one in _table(line.get("trainer")).items()}),
        **_numbers("train", line),
        **(costs := _numbers("cost", {key or "trainer": one for key, one in _table(line.get("cost")).items()})),
    }
    for key, name in _GROUPS.items():
        values.update(_numbers(f"train/{name}", line.get(key)))
    values.update(_tasks("train", line))
    for role, parts in _table(line.get("bubbles")).items():
        values.update(_numbers(f"bubbles/{role}", parts))
    if costs:
        values["cost/total"] = math.fsum(costs.values())
    return ScalarPoint(kind="train", step=int(line["step"]) + 1, time_s=float(line.get("time_s", 0.0)), values=values)


def evaluation_point(line: Mapping[str, Any]) -> ScalarPoint:
    """Of a line of `evaluations.jsonl`."""
    values = {**_numbers("eval", line), **_tasks("eval", line)}
    return ScalarPoint(kind="eval", step=int(line["step"]), time_s=float(line.get("time_s", 0.0)), values=values)


def _tasks(prefix: str, line: Mapping[str, Any]) -> dict[str, float]:
    """Of the tasks of a mixture."""
    found: dict[str, float] = {}
    for name, numbers in _table(line.get("tasks")).items():
        found.update(_numbers(f"{prefix}/task/{name}", numbers))
    return found


def _named(key: str) -> str:
    """`clip_fraction/local/0` is `pool/local/0/clip_fraction`: no name is the beginning of another, as some trackers keep names as paths."""
    name, *where = key.split("/")
    return "/".join(("pool", *where, name)) if where else name


def _numbers(prefix: str, table: object) -> dict[str, float]:
    return {f"{prefix}/{_ODD.sub('_', str(key))}": value for key, value in _finite(_table(table))}


def _finite(table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and key not in _NOT_VALUES and math.isfinite(value):
            yield key, float(value)


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
