"""The benchmark of one GPU: what it begins, and what it leaves out with a reason. That its parts run: tests/integration/test_gpu_benchmark.py."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield import_module("gpu")
    sys.path.remove(str(BENCHMARKS))


def test_the_smallest_default_shape_has_room_in_ten_minutes(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GPU", True)
    budgets = [part.budget_s(gpu.SHAPES["0.5B"]) for part in gpu.PARTS.values()]
    assert sum(budgets) < 600


def test_a_part_whose_budget_is_not_left_is_not_begun(gpu: Any) -> None:
    output, outcome = gpu.attempt("modes", "tiny", left_s=7.4)
    assert (output, outcome) == ("", f"skipped: 7 s are left, its budget is {gpu.PARTS['modes'].budget_s(gpu.SHAPES['tiny']):.0f} s")  # fmt: skip


@pytest.mark.parametrize(
    ("free_gib", "trained"), [(300, "trained are all weights"), (60, "all weights need"), (10, None)]
)
def test_what_is_trained_follows_from_the_memory(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: int, trained: str | None
) -> None:
    monkeypatch.setattr(gpu, "free_bytes", lambda _, *, ranks: free_gib * 2**30 // ranks)
    gpu.save_structure(gpu.SHAPES["7B"], tmp_path)
    if trained is None:
        with pytest.raises(gpu.SkippedError, match=f"all weights need .* GiB, {free_gib} are free; adapters need"):
            gpu._fitting(gpu.SHAPES["7B"], tmp_path)
        return
    spec, need, what = gpu._fitting(gpu.SHAPES["7B"], tmp_path)
    assert what.startswith(trained)
    assert (spec.trainer.lora is None) == (free_gib == 300)
    assert need.all < free_gib * 2**30
