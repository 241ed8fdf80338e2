"""The arithmetic of the comparison with TRL: paired differences, their interval, what a stored result is named by."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def parity() -> Iterator[Any]:
    """The script, whose folder is not on the path; it adds that of its tasks."""
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("parity")
    sys.path[:] = before


def _rewards(after: float) -> dict[str, dict[str, float]]:
    return {"before": {"greedy": 0.4, "sampled": 0.3}, "after": {"greedy": after, "sampled": after - 0.1}}


def test_differences_are_paired_by_seed_and_have_students_interval(parity: Any) -> None:
    mine, others = {0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {0: 0.4, 1: 0.5, 2: 0.6}
    # differences .1 .2 .3: mean .2, deviation .1, 4.303 * .1 / sqrt(3) = .248
    assert parity.difference(mine, others) == "+0.200 (-0.048 to +0.448)"
    assert parity.difference({0: 0.5}, others) == "+0.100"
    assert parity.difference({}, others) == ""


def test_a_table_has_what_there_is(parity: Any) -> None:
    found = {("lazy", seed, "S = 0"): _rewards(0.9) for seed in (0, 1)} | {("lazy", 0, "TRL"): _rewards(0.8)}
    head, rule, greedy, sampled = parity.table(found)
    assert {line.count("|") for line in (head, rule, greedy, sampled)} == {11}
    assert greedy == "| lazy | greedy | 2/0/1 | 0.400 ± 0.000 | 0.900 ± 0.000 |  | 0.800 ± 0.000 | +0.100 |  |  |"
    assert sampled.startswith("| lazy | sampled | 2/0/1 | 0.300 ± 0.000 | 0.800 ± 0.000 |")


@pytest.mark.parametrize("other", [{"task": "words"}, {"seed": 1}, {"arm": "S = 1"}])
def test_each_arm_has_a_file_of_its_own(parity: Any, tmp_path: Path, other: dict[str, object]) -> None:
    same = {"task": "lazy", "seed": 0, "arm": "S = 0", "changes": ()}
    assert parity.result_file(tmp_path, **same) != parity.result_file(tmp_path, **(same | other))


def test_another_setting_makes_another_result(parity: Any, tmp_path: Path) -> None:
    same = {"task": "lazy", "seed": 0, "arm": "TRL"}
    before = parity.result_file(tmp_path, **same, changes=())
    assert parity.result_file(tmp_path, **same, changes=["spec.pipeline.steps=3"]) != before
