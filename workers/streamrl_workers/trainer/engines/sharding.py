"""How a rank's model lies on its hardware: device, number format, shards, recomputed activations, compiled blocks; torch's process group.

Owns: torch's rendezvous (NCCL between GPUs, gloo between processors), the mesh of ranks, FSDP2, how gradients are reduced (as sums:
they are scaled once, in the update), bfloat16. Does not own: who the ranks are (`process_group.py`), files. The functions that make full tensors
are collectives: every rank calls them in the same order.

- Rank 0 opens torch's store on a free port and tells the others by their link, so the job's rendezvous port stays with these.
- Mesh: dimensions `replicate`, `shard`, `tensor`; the last changes fastest (docs/decisions/0092-mesh-of-ranks.md). With replicas a
  gradient is summed over the shards of one, and each shard of the sum over the replicas.
  Context groups and expert groups are parts of `shard`; a second mesh has the latter as a dimension.
- Shards: a transformer block is gathered when it is needed, and dropped again, also behind the forward pass and also the root's
  tensors (embeddings, head): a forward pass without backward would else leave them as they were before the next update.
- Number formats: float32 weights and optimiser always; with BF16 the passes and the published weights are bfloat16. FSDP does it, with
  one rank too: autocast would keep what passes from block to block in float32.
- Activation checkpointing: a block keeps its inputs and computes its activations again in the backward pass. transformers' own
  switch works in training mode only, which would bring dropout; torch's wrapper module changes the names of tensors. So the
  blocks' `forward` is replaced: hooks of FSDP stay outside of it, names stay as they are. Compiled blocks are made the same way.
- CPU offload: shards lie in main memory, and FSDP brings a block to the GPU when it is needed. What ranks
  tell each other of shards then goes by gloo, also between GPUs.
"""

import functools
import importlib.util
import logging
import os
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore  # as torch.distributed shows it, where mypy sees it
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from streamrl.errors import UserError
from streamrl.keys import ENV_LOCAL_RANK
from streamrl.spec.training import NumberFormat, Parallelism, Trainer
from streamrl_workers.trainer.engines.blocks import copies_of, part_of
from streamrl_workers.trainer.engines.engine import RankEnvironment
from streamrl_workers.trainer.engines.expert_parallel import EXPERT, check_experts, cut_experts, stacks_of
from streamrl_workers.trainer.engines.tensor_parallel import TENSOR, cut_model

log = logging.getLogger(__name__)


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer blocks: the list of modules with the most parameters. Of equal ones the first: a copy's stay as they are."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    largest = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=())
    return list(largest)


def shard_first(
    model: torch.nn.Module,
    *,
    mesh: DeviceMesh,
    tensor: DeviceMesh | None = None,
    experts: DeviceMesh | None = None,
    compute: torch.dtype | None,
    reduce: torch.dtype = torch.float32,
    offload: bool,
) -> None:
    """Shard in place, with the weights that rank 0 has; the others need none, and wait while it loads them. A collective.

    `tensor`: the mesh of this rank's tensor group; its ranks cut the layers before these are sharded over `mesh`.
    `experts`: the mesh of `expert_mesh`, of which groups divide experts.
    """
    if experts is not None:
        check_experts(model, ranks=experts[EXPERT].size())
    group = dist.new_group(timeout=timedelta(seconds=START_S))
    whole = [one.detach() for one in _lasting(model)] if rank_of() == 0 else None
    if tensor is not None and tensor.size() > 1:
        cut_model(model, mesh=tensor)
    shard(model, mesh=mesh, experts=experts, compute=compute, reduce=reduce, offload=offload)
    for number, lasting in enumerate(_lasting(model)):
        part = local(lasting.detach())
        given = torch.empty(lasting.shape, dtype=part.dtype, device=part.device) if whole is None else whole[number]
        given = given.to(part.device)
        dist.broadcast(given, src=0, group=group)
        if whole is None:
            part.copy_(part_of(given, lasting))
    dist.destroy_process_group(group)


def _lasting(model: torch.nn.Module) -> list[torch.Tensor]:
    """Weights and what else is saved of a model, tied ones once."""
    return list({id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}.values())


def shard(
    model: torch.nn.Module,
    *,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    compute: torch.dtype | None,
    reduce: torch.dtype,
    offload: bool,
) -> None:
    """Shard in place, block by block. `compute`: format of passes, None = that of the weights; `reduce`: of the sums over ranks.

    A copy within the model (a part of its own kind) is sharded as a model: only its own passes gather it.
    `offload`: shards, their gradients and so their optimiser lie in main memory.
    """
    for part in model.children():
        if isinstance(part, type(model)):
            shard(part, mesh=mesh, experts=experts, compute=compute, reduce=reduce, offload=offload)
    policy = MixedPrecisionPolicy() if compute is None else MixedPrecisionPolicy(compute, reduce)
    settings: dict[str, Any] = {"reshard_after_forward": True}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    if experts is not None:
        for stack in stacks_of(model):  # layer by layer: half of a large model may not fit on the device
            cut_experts(stack, mesh=experts[EXPERT])
            own = replace(policy, cast_forward_inputs=False)  # weights of a token's experts stay as the model made them
            fully_shard(stack, mesh=fsdp_mesh(experts), mp_policy=own, **settings)
    for module in (*blocks_of(model), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank."""
    whole: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, sharing memory with the tensor."""
    part: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part


def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """2-norm over all parts of all ranks, each counted once: a collective if the tensors are sharded. Equal on every rank."""
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    by_copies: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_copies[copies_of(tensor)].append(local(tensor))
    squares = [torch.nn.utils.get_total_norm(parts).double().square() / copies for copies, parts in by_copies.items()]
    square = torch.stack(squares).sum()
    dist.all_reduce(square)
    return square.sqrt().to(tensors[0].dtype)


def rank_of() -> int:
    """This process among the ranks; 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def sharded() -> bool:
    """Whether FSDP gathers the weights: a pass that fails in its midst cannot be made again."""
    return dist.is_initialized()


def compute_device(model: torch.nn.Module) -> torch.device:
    """Where passes run. With CPU offload the weights lie elsewhere."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


START_S = 600.0
"""For all ranks to load torch and the model: alive, as their beats say, and slow on a busy machine. A lost one ends it at once."""
_SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_")
"""Beginnings of the names of variables that libraries of collectives read."""
_NCCL_SPARE_S = 60.0
"""NCCL's own deadline kills the process without a word; ours comes first."""


def device_of(env: RankEnvironment) -> torch.device:
    """The GPU of this rank, or the processor where there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if env.local_rank >= torch.cuda.device_count():
        raise UserError(
            field=ENV_LOCAL_RANK,
            rule=f"must be below the {torch.cuda.device_count()} GPUs of this machine",
            got=env.local_rank,
            fix="lower spec.trainer.processesPerNode",
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return device


def open_store(env: RankEnvironment) -> tuple[TCPStore, int]:
    """Rank 0: the store, listening where the rendezvous does, and its port."""
    try:
        listener = socket.create_server((env.host, 0))
    except OSError:
        listener = socket.create_server(("", 0))  # the rendezvous is a service's name
    port: int = listener.getsockname()[1]
    store = TCPStore(
        env.host, port, env.size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def reach_store(env: RankEnvironment, *, port: int) -> TCPStore:
    """Every other rank: the same store."""
    return TCPStore(env.host, port, env.size, is_master=False, timeout=timedelta(seconds=START_S))


def join_group(
    env: RankEnvironment,
    *,
    store: TCPStore,
    timeout_s: float,
    device: torch.device,
    offload: bool,
    parallelism: Parallelism,
) -> DeviceMesh:
    """Come together; a collective. From then on ranks that do not answer each other for `timeout_s` raise RuntimeError."""
    if env.host in {"127.0.0.1", "localhost", "::1"}:  # gloo else takes the address of the machine's name
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if settings := [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)]:
        log.info("settings of collectives from the environment: %s", ", ".join(settings))
    timeout = group_timeout(timeout_s, device=device)
    dist.init_process_group(
        _backend(device, offload=offload),
        store=store,
        rank=env.rank,
        world_size=env.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and not offload else None,
    )
    mesh = _create_mesh(device, parallelism=parallelism)
    _limit(mesh, timeout=timeout)
    return mesh


def group_timeout(timeout_s: float, *, device: torch.device) -> timedelta:
    """Return the deadline of a group's collectives where ranks wait `timeout_s` for each other."""
    return timedelta(seconds=timeout_s + (_NCCL_SPARE_S if device.type == "cuda" else 0.0))


def mesh_of_one(device: torch.device) -> DeviceMesh:
    """Return the mesh of a rank alone whose weights FSDP gathers: from main memory, or into another format."""
    if not dist.is_initialized():
        dist.init_process_group(_backend(device, offload=True), store=HashStore(), rank=0, world_size=1)
    return _create_mesh(device, parallelism=Parallelism())


_DIMENSIONS = ("replicate", "shard", TENSOR)


def _create_mesh(device: torch.device, *, parallelism: Parallelism) -> DeviceMesh:
    """Return the mesh of all ranks. Ranks of a tensor group follow each other, as those of a node do; replicas are farthest apart."""
    replicate, tensor = parallelism.replicate, parallelism.tensor
    shape = (replicate, dist.get_world_size() // (replicate * tensor), tensor)
    return init_device_mesh(device.type, shape, mesh_dim_names=_DIMENSIONS)


def expert_mesh(mesh: DeviceMesh, *, experts: int, timeout_s: float) -> DeviceMesh:
    """Return the mesh of all ranks in which those of `shard` that follow each other are groups of `experts` ranks. A collective."""
    shape = (mesh["replicate"].size(), mesh["shard"].size() // experts, experts)
    divided = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard", EXPERT))
    _limit(divided, timeout=group_timeout(timeout_s, device=torch.device(mesh.device_type)))
    return divided


def _limit(mesh: DeviceMesh, *, timeout: timedelta) -> None:
    """Give the groups of a mesh the job's timeout: torch gives them its own."""
    for dimension in mesh.mesh_dim_names or ():
        _set_pg_timeout(timeout, mesh.get_group(dimension))


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of the mesh over which FSDP shards; of two dimensions it replicates over the first."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def _backend(device: torch.device, *, offload: bool) -> str:
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if offload else "nccl"


_TF32_CAPABILITY = (8, 0)
"""CUDA's first compute capability with TF32."""


def published_dtype(precision: NumberFormat) -> torch.dtype:
    """Format of published and exported weights, and of generators."""
    return torch.bfloat16 if precision == "BF16" else torch.float32


def set_precision(trainer: Trainer, *, device: torch.device) -> None:
    """Let this process multiply matrices as the job says. Raises UserError where the hardware does not compute in the format: emulated it is slower than float32."""
    lacking = None
    if trainer.number_format == "BF16" and not has_bf16(device):
        lacking = "bfloat16 arithmetic"
    if trainer.precision == "TF32":
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY:
            torch.set_float32_matmul_precision("high")
        else:
            lacking = "TF32"
    if lacking is not None:
        raise UserError(
            field="spec.trainer.precision",
            rule=f"must be FP32 on hardware without {lacking}",
            got=trainer.precision,
            fix="set FP32, or train on a GPU or processor that has it",
        )


def has_bf16(device: torch.device) -> bool:
    """GPU: what torch says without emulation; processor: a feature that names it (avx512_bf16, amx_bf16, Arm's bf16)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(name.endswith("bf16") for name, present in torch.cpu.get_capabilities().items() if present is True)


def recompute_blocks(model: torch.nn.Module) -> None:
    """From now on, in place. No randomness is restored for the second pass: there is no dropout."""
    for block in blocks_of(model):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def compile_blocks(model: torch.nn.Module) -> None:
    """From now on, in place; blocks of one kind share what is compiled. Lengths of batches vary, so shapes are not compiled in."""
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise UserError where nothing could be compiled, by what torch and Triton will call."""
    gpu = device.type == "cuda"
    missing = None
    if gpu and importlib.util.find_spec("triton") is None:
        missing = "the package triton"
    elif not any(map(shutil.which, _compilers(gpu=gpu))):
        missing = f"a {'C' if gpu else 'C++'} compiler"
    if missing is not None:
        raise UserError(
            field="spec.trainer.compile",
            rule=f"must be false where {missing} is missing",
            got=True,
            fix="leave it out, or run the trainer where there is one",
        )


def _compilers(*, gpu: bool) -> Sequence[str]:
    """One of them is enough."""
    if gpu:
        return [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    return [os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")]
