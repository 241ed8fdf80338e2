"""The course of the run in some hundred points: what `/curves` of the signals port says.

Owns which lines of `steps.jsonl` and `evaluations.jsonl` are taken and what of each. Keeps nothing between two requests: a restart loses nothing.

Invariant: a request reads at most `MOST_POINTS` lines, or `_WHOLE_BYTES`, of a file, however long the run.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MOST_POINTS = 200
"""As many as a chart has room for; some 25 µs each."""
_WHOLE_BYTES = 262_144
"""A file that is no larger is read whole."""
_LINE_BYTES = 65_536
"""Longer lines are passed over."""
_OF_STEP = ("step", "reward_mean", "tasks", "tokens_per_s", "bubbles")
_OF_EVALUATION = ("step", "mean_reward", "sampled_reward", "tasks")


def curves(steps: Path, evaluations: Path) -> dict[str, list[dict[str, Any]]]:
    """What `/curves` shows."""
    return {"steps": _points(steps, _OF_STEP), "evaluations": _points(evaluations, _OF_EVALUATION)}


def _points(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """In the order of steps; of steps that a trainer took again the later ones, as far as the lines that are read tell."""
    points: list[dict[str, Any]] = []
    for line in _spread_lines(path):
        if not isinstance(line.get("step"), int):
            continue
        while points and points[-1]["step"] >= line["step"]:
            points.pop()
        points.append({key: line[key] for key in keys if key in line})
    stride = -((1 - len(points)) // (MOST_POINTS - 1)) or 1
    return points[:-1:stride] + points[-1:]


def _spread_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    """JSON lines that are evenly spread over a file, its last one among them; of a small file all."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if size <= _WHOLE_BYTES:
            for line in file.read(_WHOLE_BYTES).splitlines():
                yield from _parsed(line)
            return
        for number in range(MOST_POINTS - 1):
            file.seek(size * number // (MOST_POINTS - 1))
            if number:
                file.readline(_LINE_BYTES)  # the rest of the line in which this place is
            yield from _parsed(file.readline(_LINE_BYTES))
        file.seek(size - _LINE_BYTES)
        ends = [one for line in file.read(_LINE_BYTES).splitlines()[-2:] for one in _parsed(line)]
        yield from ends[-1:]


def _parsed(line: bytes) -> Iterator[Mapping[str, Any]]:
    try:
        document = json.loads(line)
    except ValueError:  # half a line that a killed scheduler left, or that is being written
        return
    if isinstance(document, dict):
        yield document
