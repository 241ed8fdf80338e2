"""The models of one rank, from a job and a model folder, as `RankWorker` takes them.

Owns: which models there are, and the order in which they are made: copies first, then adapters, activation checkpointing,
number format, shards (each of these changes the model in place).

Every rank loads the whole model into its memory and then keeps its part (docs/decisions/0006-ranks.md).
"""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from streamrl.spec import RLJobSpec
from streamrl.spec.training import Trainer
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines import precision
from streamrl_workers.trainer.engines.critic import ValueModel
from streamrl_workers.trainer.engines.recompute import recompute_blocks
from streamrl_workers.trainer.engines.reference import FrozenCopy, Reference
from streamrl_workers.trainer.engines.sharding import shard
from streamrl_workers.trainer.engines.worker import Parts, RankWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a rank computes on."""

    device: torch.device
    mesh: DeviceMesh | None = None  # of all ranks; None: there is one


def build_worker(spec: RLJobSpec, *, model_path: str, where: Where) -> RankWorker:
    """The worker of this rank with the initial weights. Ranks build alike, from the job's seed."""
    return RankWorker(build_parts(spec, model_path=model_path, where=where), spec=spec)


def build_parts(spec: RLJobSpec, *, model_path: str, where: Where) -> Parts:
    """The models of this rank."""
    trainer = spec.trainer
    precision.check_hardware(trainer.precision, device=where.device)
    torch.manual_seed(spec.seed)
    algorithm = create_algorithm(spec)
    model = load_model(model_path)
    reference: Reference | None = None
    critic: ValueModel | None = None
    if algorithm.critic is not None:
        critic = ValueModel.of(load_model(model_path))
        _finish(critic, trainer=trainer, where=where)
    if algorithm.reference_kl is not None and trainer.lora is None:
        initial = load_model(model_path)
        reference = FrozenCopy(initial)
        _finish(initial, trainer=trainer, where=where, trained=False)
    if trainer.lora is not None:
        from streamrl_workers.trainer.engines import lora  # peft is loaded where it is asked for

        lora.add_adapters(model, trainer.lora)
        reference = lora.AdaptersOff(model) if algorithm.reference_kl is not None else None
    _finish(model, trainer=trainer, where=where)
    tokenizer = load_tokenizer(model_path)
    return Parts(model=model, tokenizer=tokenizer, algorithm=algorithm, reference=reference, critic=critic)


def _finish(model: torch.nn.Module, *, trainer: Trainer, where: Where, trained: bool = True) -> None:
    """In place: what makes a loaded model one that this rank computes with."""
    dtype = precision.published_dtype(trainer.precision)
    compute = None if dtype is torch.float32 else dtype
    if trainer.activation_checkpointing and trained:
        recompute_blocks(model)
    if where.mesh is not None:
        shard(model, mesh=where.mesh, compute=compute)  # moves it to the device, block by block
        return
    model.to(where.device)
    if compute is not None:
        precision.compute_in(model, dtype=compute, device=where.device)
