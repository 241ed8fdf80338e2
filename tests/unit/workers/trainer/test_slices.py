"""What each rank copies of a model: together every byte once, and those of one rank. Each rank is simulated: torch's process group "fake" cuts, and moves nothing."""

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from streamrl.spec.training import Lora, NumberFormat, Sherl
from streamrl_workers.models.load import load_model
from streamrl_workers.models.lora import add_adapters
from streamrl_workers.models.side_path import train_side_path
from streamrl_workers.trainer.engines import model_files, slices
from streamrl_workers.trainer.engines.sharding import local, shard
from streamrl_workers.trainer.engines.slices import HostMemory, copy_slices, first_rows, slab_bytes
from streamrl_workers.weights.hashing import SliceBytes, reserved, row_bytes
from streamrl_workers.weights.store import WeightStore
from support.model_families import save_tiny
from support.tiny_folder import tiny_folder

MODELS = ["tied", "qwen3_moe", "deepseek_v3", "lora", "side path"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tied = tiny_folder(root / "tied")
    return {
        **dict.fromkeys(("tied", "lora", "side path"), tied),
        **{family: save_tiny(family, root / family) for family in ("qwen3_moe", "deepseek_v3")},
    }


def _model(name: str, folders: dict[str, Path]) -> PreTrainedModel:
    torch.manual_seed(0)
    model = load_model(str(folders[name]))
    if name == "lora":
        add_adapters(model, Lora(rank=3))
    if name == "side path":
        train_side_path(model, Sherl.model_validate({"lateLayers": 1, "width": 4}))
    return model


@contextmanager
def _as_rank(rank: int, *, of: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _slices(model: PreTrainedModel, *, precision: NumberFormat, ranks: int) -> list[dict[str, SliceBytes]]:
    """What each of the ranks copies of the model."""
    found = []
    for rank in range(ranks):
        with _as_rank(rank, of=ranks):
            part = copy.deepcopy(model)
            shard(part, mesh=init_device_mesh("cpu", (ranks,)), compute=None, reduce=torch.float32, offload=False)
            with CommDebugMode() as calls:
                base = copy_slices(model_files.published_views(part, precision=precision, trained=False))
                trained = copy_slices(model_files.published_views(part, precision=precision, trained=True))
            assert calls.get_total_counts() == 0, "nothing is gathered"
            found.append({one.name: one for one in (*base, *trained)})
            assert len(found[-1]) == len(base) + len(trained)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_slices_of_all_ranks_are_the_tensors_of_one(name: str, ranks: int, folders: dict[str, Path]) -> None:
    model = _model(name, folders)
    precision: NumberFormat = "BF16" if ranks % 2 else "FP32"
    whole = model_files.tensors(model, precision=precision)
    parts = _slices(model, precision=precision, ranks=ranks)
    assert {one for part in parts for one in part} == whole.keys()
    for tensor, expected in whole.items():
        held = [part[tensor] for part in parts if tensor in part]
        rows = [one.data.nbytes // row_bytes(one.dtype, one.shape) for one in held]
        assert [one.first_row for one in held] == [sum(rows[:number]) for number in range(len(held))]
        assert {(one.dtype, one.shape) for one in held} == {(expected.dtype, expected.shape)}
        assert b"".join(one.data for one in held) == bytes(expected.data), tensor
        assert all(one.data.readonly for one in held)
    total = sum(one.data.nbytes for one in whole.values())
    assert sum(one.data.nbytes for part in parts for one in part.values()) == total
    assert max(sum(one.data.nbytes for one in part.values()) for part in parts) < 1.4 * total / ranks + 4096


@pytest.mark.parametrize(
    ("view", "whole", "ranks", "expected"),
    [
        (lambda t: t, (5, 2), 2, [0, 3, 5]),
        (lambda t: t, (1, 4), 2, [0, 1, 1]),
        (lambda t: t, (2,), 4, [0, 1, 2, 2, 2]),
        (lambda t: t[2], (4, 3, 2), 2, [0, 0, 3]),  # an expert
        (lambda t: t[1, :2], (2, 4, 2), 2, [0, 0, 2]),  # half of what an expert has in one
        (lambda t: t[2:5], (6, 2), 2, [0, 1, 3]),  # a part of a fused tensor
        (lambda t: t[1::2], (6, 2), 3, [0, 1, 2, 3]),
        (lambda t: t.T, (4, 3), 2, None),
        (lambda t: t.T, (4, 3), 1, [0, 3]),
        (lambda t: t.view(2, 6), (4, 3), 4, None),
        (lambda t: t.view(8, 1), (4, 2), 2, [0, 4, 8]),
        (lambda t: t[0, 0], (2, 2), 2, None),
        (lambda t: t[:0], (2, 2), 2, None),
    ],
)
def test_rows_of_a_view_by_rank(view, whole, ranks, expected):
    tensor = torch.empty(whole, device="meta")
    shard_rows = -(-whole[0] // ranks)
    bounds = [min(whole[0], number * shard_rows) * tensor[0].numel() for number in range(ranks + 1)]
    assert first_rows(view(tensor), bounds=bounds) == expected


def test_what_is_gathered_is_counted(folders: dict[str, Path]) -> None:
    """Or the test above would show nothing."""
    model = _model("tied", folders)
    with _as_rank(0, of=2):
        shard(model, mesh=init_device_mesh("cpu", (2,)), compute=None, reduce=torch.float32, offload=False)
        with CommDebugMode() as calls:
            model_files.tensors(model)
    assert calls.get_total_counts() > 0


def test_memory_is_wasted_in_the_last_slab_alone():
    for size in (3, 100, 1000):
        left, taken = size * 2**20, 0
        while left:
            slab = slab_bytes(min(left, 30 * 2**20), left_bytes=left)
            assert slab & (slab - 1) == 0 or slab <= 64 * 2**20
            taken += slab
            left -= min(slab, left)
        assert taken == size * 2**20


def test_memory_is_freed_with_the_last_copy_in_it():
    memory = HostMemory(2**12)
    first, second = (memory.copy(torch.full((512,), value), dtype=torch.float32) for value in (1.0, 2.0))
    del memory
    gc.collect()
    assert (set(first.cast("f")), set(second.cast("f"))) == ({1.0}, {2.0})
    with pytest.raises(TypeError):
        first[0] = 0


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_two_versions_are_in_memory_at_most(ranks: int, folders: dict[str, Path], monkeypatch: Any) -> None:
    """The announced one, and the one that is copied, hashed and announced."""
    alive: dict[int, int] = {}
    peaks = []

    def counted(size_bytes: int) -> memoryview:
        memory = reserved(size_bytes)
        alive[id(memory.obj)] = size_bytes
        weakref.finalize(memory.obj, alive.pop, id(memory.obj))
        peaks.append(sum(alive.values()))
        return memory

    monkeypatch.setattr(slices, "reserved", counted)
    whole = sum(one.data.nbytes for one in model_files.tensors(_model("qwen3_moe", folders)).values())
    total = 0
    for rank in range(ranks):
        with _as_rank(rank, of=ranks):
            model, store = _model("qwen3_moe", folders), WeightStore(newest_kept=3)
            shard(model, mesh=init_device_mesh("cpu", (ranks,)), compute=None, reduce=torch.float32, offload=False)
            alive.clear()
            peaks.clear()
            for step in range(5):
                store.retain(lambda version, newest=step - 1: version.step == newest)
                copies = copy_slices(model_files.published_views(model))
                store.publish_part(attempt=1, step=step, slices=copies)
                del copies
                for parameter in model.parameters():
                    local(parameter.detach()).add_(1)
            total += max(peaks)
    assert 1.99 * whole < total < 2.01 * whole + ranks * 10_000  # copies begin at multiples of 64 bytes
