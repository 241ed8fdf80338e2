"""Timelines of long files: little is read, and nothing is missing."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from streamrl_cli.reporting import walls
from streamrl_cli.reporting.walls import TimeRange, timelines

LINES = 20_000
RESTARTS = (3_000, 3_001, 3_040, 11_111, 19_998)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A line a second; the process was started anew at some of them."""
    path = tmp_path_factory.mktemp("run") / "trainer-0.jsonl"
    chance, wall_s, busy_s, instance = random.Random(1), 0.0, 0.0, 0
    with path.open("w") as out:
        for at in range(LINES):
            if at in RESTARTS:
                wall_s, busy_s, instance = 0.0, 0.0, instance + 1
            wall_s, busy_s = wall_s + 1, busy_s + chance.random()
            parts = {"busy": busy_s, "pipeline_no_samples": wall_s - busy_s}
            out.write(json.dumps({"t": 1e9 + at, "instance": f"i{instance}", "wall_s": wall_s, "parts": parts}) + "\n")
        out.write('{"t": 1')
    return path


def shown(file: Path, window: TimeRange | None = None) -> walls.Timeline:
    (found,) = timelines({"trainer-0": file}, beneath=file.parent, window=window)
    return found


@pytest.fixture
def whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> walls.Timeline:
    """By all lines."""
    with monkeypatch.context() as patch:
        patch.setattr(walls, "_LINES", 10**9)
        return shown(file)


def test_a_long_file_gives_the_totals_of_all_its_lines(file: Path, whole: walls.Timeline) -> None:
    sparse = shown(file)
    assert sparse.wall_s == pytest.approx(LINES)
    assert sparse.totals_s == pytest.approx(whole.totals_s)
    assert [name for _, name in sparse.instances] == [f"i{at}" for at in range(len(RESTARTS) + 1)]
    assert [round(at_s - 1e9) + 1 for at_s, _ in sparse.instances[1:]] == list(RESTARTS)
    for one, other in zip(sparse.shares["busy"], whole.shares["busy"], strict=True):
        assert one == pytest.approx(other, abs=0.02)


def test_few_lines_of_a_long_file_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(walls, "parse_line", lambda line: read.append(1) or json.loads(line))
    shown(file)
    assert len(read) < LINES / 10


def test_a_part_is_shown_as_finely_as_it_was_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = shown(file, TimeRange(start=100.0, end=101.0))
    assert (part.minutes[0], part.minutes[-1]) == (pytest.approx(100 + 0.5 / 60), pytest.approx(101 - 0.5 / 60))
    assert (part.wall_s, part.bin_minutes * 60) == (pytest.approx(60), pytest.approx(1))
    assert sum(part.totals_s.values()) == pytest.approx(60)
    lines = [json.loads(line) for line in file.read_text().splitlines()[:-1]]
    busy_s = [after["parts"]["busy"] - before["parts"]["busy"] for before, after in pairwise(lines[5999:6060])]
    assert part.shares["busy"] == pytest.approx(busy_s, abs=1e-3)


def test_a_part_without_lines_is_empty(file: Path) -> None:
    part = shown(file, TimeRange(start=1000.0, end=1001.0))
    assert (part.wall_s, set(part.shares["busy"])) == (0, {0.0})


@pytest.mark.parametrize(("place", "jump_s"), [(100, -3600.0), (LINES - 3, -3.15e8)])
def test_a_clock_that_goes_back_leaves_nothing_out(file: Path, place: int, jump_s: float, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in file.read_text().splitlines()[:-1]]
    for line in lines[place:]:
        line["t"] += jump_s
    jumped = tmp_path / "trainer-0.jsonl"
    jumped.write_text("".join(json.dumps(line) + "\n" for line in lines))
    right, found = shown(file), shown(jumped)
    assert (found.wall_s, found.totals_s) == (pytest.approx(right.wall_s), pytest.approx(right.totals_s))
