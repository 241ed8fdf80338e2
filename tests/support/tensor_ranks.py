"""One of several ranks that train models together: `python -m support.tensor_ranks RANK LAYOUT FOLDER MODEL..`, LAYOUT as JSON of `Ranks`.

Of each model, a folder with the job's words in `trainer.json`, rank 0 writes what `trained` returns into FOLDER; each rank saves its part of
a checkpoint after two updates. Where FOLDER has one to be loaded the first two updates are left out.
"""

import json
import sys
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from streamrl.errors import UserError
from streamrl_workers.trainer.engines import model_files
from streamrl_workers.trainer.engines.packing import PackedSample, Update, pack_sample
from streamrl_workers.trainer.engines.sharding import full
from streamrl_workers.trainer.engines.slices import copy_slices
from streamrl_workers.trainer.engines.torch_engine import build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from support.trainer_groups import make_group, trainer_spec

UPDATES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """How ranks lie in the mesh."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def _shards(self) -> int:
        """Ranks that hold one copy of the model's tensor part."""
        return self.shard * self.context * self.expert

    @property
    def job(self) -> dict[str, Any]:
        """Words of the trainer."""
        axes = ("replicate", "context", "tensor", "expert")
        return {
            "processesPerNode": self.replicate * self._shards * self.tensor,
            "parallelism": {axis: getattr(self, axis) for axis in axes},
        }

    def mesh(self) -> DeviceMesh:
        """Return the mesh of the ranks; a collective."""
        shape = (self.replicate, self._shards, self.tensor)
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))

    def own(self, samples: list[PackedSample], *, alone: bool) -> list[PackedSample]:
        """Return the samples of this rank's data rank. `alone`: the first one has all of them, and the others pass a dummy."""
        if not dist.is_initialized():
            return samples
        place = dist.get_rank() // (self.context * self.tensor)
        if alone:
            return [] if place else samples
        return samples[place :: self.replicate * self.shard * self.expert]


CPU = torch.device("cpu")


def micro_steps(update: int) -> list[list[PackedSample]]:
    """Two passes of several samples each."""
    return [
        [
            one
            for s in make_group(10 * update + n).samples
            for one in pack_sample(s, step=0, attempt=1, advantage=1.0 - n)
        ]
        for n in (0, 2)
    ]


def trained(
    model: Path,
    *,
    ranks: Ranks = Ranks(),
    mesh: DeviceMesh | None = None,
    saved: Path | None = None,
    loaded: Path | None = None,
) -> dict[str, Any]:
    """What three updates of a model leave: numbers of each, sums of the first's gradients, weights, slices."""
    spec = trainer_spec(**json.loads((model / "trainer.json").read_text()), **ranks.job)
    worker = RankWorker(build_models(spec, model_path=str(model), device=CPU, mesh=mesh), spec=spec)
    numbers, gradients = [], {}
    resumes = loaded is not None and loaded.is_dir()
    if resumes:
        worker.load(str(loaded))
    for update in range(UPDATES - 1 if resumes else 0, UPDATES):
        worker.begin(None)
        if update == UPDATES - 1 and saved is not None:
            saved.mkdir(exist_ok=True)
            worker.save(str(saved)).result()
        for number, samples in enumerate(micro_steps(update)):
            own = ranks.own(samples, alone=number > 0)
            prepared = worker.prepare(own)[: len(own)]  # a dummy's are left out
            worker.accumulate([_prepared(sample, found) for sample, found in zip(own, prepared, strict=True)])
        numbers.append(worker.update(Update(step=update, scale=0.1, critic_scale=0.1, policy=True)))
        numbers[-1]["losses"] = _summed(worker.measured(None)[-3:-1], ranks=ranks)
        if not update:
            gradients = {name: full(gradient).clone() for name, gradient in worker.gradients().items()}
    slices = copy_slices(model_files.published_views(worker._model))
    published = {(one.name, one.first_row): bytes(one.data) for one in slices}
    weights = {name: bytes(one.data) for name, one in worker.tensors(None).items()}
    return {"numbers": numbers, "gradients": gradients, "weights": weights, "published": published}


def _prepared(sample: PackedSample, found: dict[str, Any]) -> PackedSample:
    values_N = found.get("values_N", ())
    return replace(sample, **found, returns_N=array("d", [1.0 - value for value in values_N]) if values_N else None)


def _summed(numbers: list[float], *, ranks: Ranks) -> list[float]:
    if not dist.is_initialized():
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / (ranks.tensor * ranks.context)).tolist()


def main(rank: int, ranks: Ranks, folder: Path, models: list[Path]) -> None:
    """One model after the other."""
    torch.set_num_threads(1)
    size = ranks.job["processesPerNode"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = ranks.mesh()
    for model in models:
        saved, loaded = folder / f"{model.name}-saved", folder / f"{model.name}-loaded"
        try:
            found = trained(model, ranks=ranks, mesh=mesh, saved=saved, loaded=loaded)
        except UserError as error:
            found = {"refused": str(error)}
        published: list[Any] = [None] * size
        dist.all_gather_object(published, found.pop("published", {}))
        if rank == 0:
            torch.save({**found, "published": published}, folder / f"{model.name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Ranks(**json.loads(sys.argv[2])), Path(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
