"""How long a training step waits for a checkpoint: written at once, copied and written beside, and by torch.distributed.checkpoint.

    python benchmarks/checkpoints.py [--mib 768] [--rounds 5]

One rank, one state of float32 tensors. Each round measures all of them, in turns; ratios are of one run. "Waits": what the step loses. "Whole":
until the files are hashed and on the disk. DCP hashes nothing.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch._C._distributed_c10d import HashStore

from streamrl_workers.process.daemon_thread import begin_in_thread
from streamrl_workers.trainer.checkpoint import CheckpointMeta, CheckpointStore
from streamrl_workers.trainer.engines import shard_files

TENSOR = (1024, 4096)
AMPLE = 2**62
Measured = tuple[float, float]
"""Seconds that the step waits, and until it is whole."""


def beside(state: dict[str, torch.Tensor], *, writer: shard_files.ShardWriter, folder: Path) -> Measured:
    """As the trainer does it."""

    def save(directory: Path) -> object:
        write = writer.stage(directory / "rank-00000.safetensors", state, own={}, room_bytes=AMPLE)
        return begin_in_thread(lambda: {"rank-00000.safetensors": write()}, name="saving")

    store, began_s = CheckpointStore(folder, keep_last=1), time.monotonic()
    started = store.begin(_meta(), save=save)  # type: ignore[arg-type] # a Future
    waited_s = time.monotonic() - began_s
    store.complete(started, sync=lambda: None)
    return waited_s, time.monotonic() - began_s


def at_once(state: dict[str, torch.Tensor], *, folder: Path) -> Measured:
    """Written by safetensors, hashed from the disk, while the step waits: what the trainer did before."""

    def save(directory: Path) -> None:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, directory / "state")

    began_s = time.monotonic()
    CheckpointStore(folder, keep_last=1).write(_meta(), save=save, sync=lambda: None)
    took_s = time.monotonic() - began_s
    return took_s, took_s


def by_dcp(state: dict[str, torch.Tensor], *, folder: Path) -> Measured:
    """`async_save`, with its staging and thread."""
    began_s = time.monotonic()
    saved = dcp.async_save(state, checkpoint_id=str(folder / "dcp"))  # type: ignore[attr-defined]
    waited_s = time.monotonic() - began_s
    saved.result()
    return waited_s, time.monotonic() - began_s


def _meta() -> CheckpointMeta:
    return CheckpointMeta(step=1, attempt=1, history=("00" * 16,))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=768, help="size of the state (default: 768)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    count = max(1, args.mib * 2**20 // (4 * TENSOR[0] * TENSOR[1]))
    state = {f"tensor-{number}": torch.randn(TENSOR) for number in range(count)}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    kinds: dict[str, Callable[..., Measured]] = {
        "at once": at_once,
        "beside": partial(beside, writer=shard_files.ShardWriter()),
        "DCP": by_dcp,
    }
    times: dict[str, list[Measured]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, measure in kinds.items():
            with tempfile.TemporaryDirectory() as scratch:
                times[name].append(partial(measure, folder=Path(scratch))(state))
    dist.destroy_process_group()
    print(f"{count * 4 * TENSOR[0] * TENSOR[1] / 2**20:.0f} MiB, medians of {args.rounds}\n")
    print("| | the step waits | of at once | whole |\n|---|---|---|---|")
    medians = {name: [statistics.median(one) for one in zip(*found, strict=True)] for name, found in times.items()}
    for name, (waited_s, whole_s) in medians.items():
        print(f"| {name} | {waited_s:.2f} s | {waited_s / medians['at once'][0]:.3f} | {whole_s:.2f} s |")


if __name__ == "__main__":
    main()
