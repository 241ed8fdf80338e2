"""One of several ranks that share layers or experts of models: `python -m support.tensor_ranks RANK LAYOUT FOLDER MODEL..`.

LAYOUT: what a job says of ranks, as JSON. Of each model, a folder with the job's words in `trainer.json`, rank 0 writes what `trained` returns into FOLDER; each rank saves its part of
a checkpoint after two updates. Where FOLDER has one to be loaded the first two updates are left out.
"""

import json
import sys
from array import array
from dataclasses import replace
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
    mesh: DeviceMesh | None = None,
    saved: Path | None = None,
    loaded: Path | None = None,
    **layout: Any,
) -> dict[str, Any]:
    """What three updates of a model leave: numbers of each, sums of the first's gradients, weights, slices.

    `layout`: what the job says of ranks. The second pass of an update has samples on one data rank alone: the others pass a dummy.
    """
    spec = trainer_spec(**json.loads((model / "trainer.json").read_text()), **layout)
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
            own = samples if mesh is None else _dealt(samples, mesh=mesh, alone=number == 1)
            prepared = worker.prepare(own)[: len(own)]  # a dummy's are left out
            worker.accumulate([_prepared(sample, found) for sample, found in zip(own, prepared, strict=True)])
        numbers.append(worker.update(Update(step=update, scale=0.1, critic_scale=0.1, policy=True)))
        numbers[-1]["losses"] = _summed(worker.measured(None)[-3:-1], mesh=mesh)
        if not update:
            gradients = {name: full(gradient).clone() for name, gradient in worker.gradients().items()}
    slices = copy_slices(model_files.published_views(worker._model))
    published = {(one.name, one.first_row): bytes(one.data) for one in slices}
    weights = {name: bytes(one.data) for name, one in worker.tensors(None).items()}
    return {"numbers": numbers, "gradients": gradients, "weights": weights, "published": published}


def _dealt(samples: list[PackedSample], *, mesh: DeviceMesh, alone: bool) -> list[PackedSample]:
    """Samples of this rank, which ranks of a tensor group share."""
    ranks = mesh.size() // mesh["tensor"].size()
    place = mesh.get_rank() // mesh["tensor"].size()
    return samples[place::ranks] if not alone else [] if place else samples


def _prepared(sample: PackedSample, found: dict[str, Any]) -> PackedSample:
    values_N = found.get("values_N", ())
    return replace(sample, **found, returns_N=array("d", [1.0 - value for value in values_N]) if values_N else None)


def _summed(numbers: list[float], *, mesh: DeviceMesh | None) -> list[float]:
    if mesh is None:
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / mesh["tensor"].size()).tolist()


def main(rank: int, layout: dict[str, Any], folder: Path, models: list[Path]) -> None:
    """One model after the other."""
    torch.set_num_threads(1)
    size = layout["processesPerNode"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    replicate, tensor = (layout["parallelism"].get(name, 1) for name in ("replicate", "tensor"))
    shape = (replicate, size // (replicate * tensor), tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
    for model in models:
        saved, loaded = folder / f"{model.name}-saved", folder / f"{model.name}-loaded"
        try:
            found = trained(model, mesh=mesh, saved=saved, loaded=loaded, **layout)
        except UserError as error:
            found = {"refused": str(error)}
        published: list[Any] = [None] * size
        dist.all_gather_object(published, found.pop("published", {}))
        if rank == 0:
            torch.save({**found, "published": published}, folder / f"{model.name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]), [Path(name) for name in sys.argv[4:]])
