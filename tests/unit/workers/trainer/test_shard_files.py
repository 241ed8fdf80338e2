"""The files of ranks in a checkpoint: what is copied, written and read."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore
from streamrl_workers.trainer.engines import shard_files, worker
from streamrl_workers.weights.hashing import tensors_hash
from support.tiny_trainer import tiny_engine, train_steps
from support.trainer_groups import make_group, trainer_spec

AMPLE, NONE = 2**40, 0
OWN = {"random": torch.arange(11, dtype=torch.uint8)}


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"half": torch.randn(3, 5).bfloat16(), "empty": torch.zeros(0, 4), "scalar": torch.tensor(7.0)}
    return tensors | {"large": torch.randn(1500, 3000), "flags": torch.tensor([True, False, True])}


@pytest.mark.parametrize("room_bytes", [AMPLE, NONE])
def test_what_is_staged_is_what_safetensors_reads(room_bytes: int, tmp_path: Path) -> None:
    tensors, path = _tensors(), tmp_path / "rank-00000.safetensors"
    write = shard_files.ShardWriter().stage(path, tensors, own=OWN, room_bytes=room_bytes)
    expected = {name: tensor.clone() for name, tensor in (tensors | OWN).items()}
    for tensor in tensors.values():
        tensor.fill_(1)  # the training goes on
    described = write()
    found = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert described["size_bytes"] == path.stat().st_size
    read = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    own = shard_files.read_shards(tmp_path, read, rank=0)
    assert torch.equal(own["random"], OWN["random"])
    assert all(torch.equal(read[name], expected[name]) for name in read)


def test_a_hash_made_while_writing_is_that_of_the_file(tmp_path: Path) -> None:
    engine = tiny_engine(trainer_spec())
    meta = CheckpointMeta(step=1, attempt=1, history=("00" * 16,))
    store = CheckpointStore(tmp_path, keep_last=1)
    directory = store.write(meta, save=engine.save, sync=lambda: None)
    assert store.newest() is not None  # hashes each file again
    assert [*json.loads((directory / "meta.json").read_text())["files"]] == ["rank-00000.safetensors"]


def test_a_critic_s_copy_counts_with_what_the_policy_s_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rooms = iter([AMPLE, NONE])
    monkeypatch.setattr(worker, "free_bytes", lambda _device, *, ranks: next(rooms) // ranks)
    files = tiny_engine(trainer_spec(rule="ppo")).save(tmp_path).result()
    assert sorted(files) == ["critic/rank-00000.safetensors", "rank-00000.safetensors"]
    assert caplog.text.count("no room for a copy") == 1


def test_a_full_disk_is_an_error_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.safetensors"
    path.symlink_to("/dev/full")
    write = shard_files.ShardWriter().stage(path, _tensors(), own=OWN, room_bytes=AMPLE)
    with pytest.raises(OSError, match=os.strerror(28)):
        write()


def test_a_checkpoint_of_releases_that_wrote_at_once_is_resumed(tmp_path: Path) -> None:
    """They had safetensors itself write the file."""
    steps = [[make_group(10 * step + number, step=step) for number in range(2)] for step in range(3)]
    through, resumed = (tiny_engine(trainer_spec(), seed=seed) for seed in (0, 9))
    train_steps(through, steps[:2])
    through.save(tmp_path).result()
    path = tmp_path / "rank-00000.safetensors"
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 - no dict
    path.unlink()
    save_file(tensors, path, metadata=metadata)
    resumed.load(tmp_path)
    assert train_steps(resumed, steps[2:], first=2) == train_steps(through, steps[2:], first=2)
    assert tensors_hash(resumed.tensors()) == tensors_hash(through.tensors())
