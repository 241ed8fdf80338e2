"""The benchmark of one GPU: what it begins, and what it leaves out with a reason. That its parts run: tests/integration/test_gpu_benchmark.py."""

import io
import lzma
import random
import subprocess
import sys
import tarfile
import zipfile
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


def test_the_smallest_default_shape_has_room_in_fifteen_minutes(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GPU", True)
    budgets = [part.budget_s(gpu.SHAPES["0.5B"]) for part in gpu.PARTS.values()]
    assert sum(budgets) < 900


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


def test_parts_of_a_wheel_give_what_is_not_left_out(gpu: Any, tmp_path: Path) -> None:
    del gpu  # its folder is on the path
    content = {"vllm/_C.abi3.so": random.Random(1).randbytes(5000), "vllm/x_vllm_fa2_C.abi3.so": b"left out", "vllm/__init__.py": b""}  # fmt: skip
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)
    parts = import_module("gpu_wheel").cut(tmp_path / "vllm.whl", tmp_path / "parts", part_bytes=2000)
    assert len(parts) >= 3
    assert all(part.stat().st_size <= 2000 for part in parts)
    whole = b"".join(part.read_bytes() for part in parts)
    if parts[0].suffix == ".zst":
        whole = subprocess.run(["zstd", "-d", "--long=31", "-c"], input=whole, capture_output=True, check=True).stdout
    else:
        whole = lzma.decompress(whole)
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        found = {member.name.removeprefix("./"): tar.extractfile(member).read() for member in tar if member.isfile()}
    assert found == {name: data for name, data in content.items() if "fa2" not in name}
