"""Expert parallelism: each rank of an expert group holds some experts of every layer, and computes them for the tokens of all.

Owns: which models can be divided and how, by the family's own plan (transformers' `ep_plan`, names and styles as data); which
tokens go where. Does not own: the exchange (`models/row_exchange.py`), what an expert computes (the model's own module), the mesh, shards (`sharding.py`).

    tokens, each with its experts ─▶ to the ranks that hold these ─▶ their experts ─▶ back ─▶ weighted sum of each token's experts

- Ranks of a group have samples of their own. An expert's gradient has the tokens of its whole group, and is summed over the others.
- A rank exchanges in every pass, also if it has a dummy or no token chose its experts: then its experts compute a row of zeros.
- Stacks of experts are cut by their first dimension: expert by expert, as they are published and saved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from streamrl_workers.models.row_exchange import exchange_rows
from streamrl_workers.trainer.engines.tensor_parallel import matching, parts_of, refused_ranks

EXPERT = "expert"
"""Name of the dimension of the mesh."""
_STACKS = {"ep_dispatch_experts", "moe_tp_experts"}
"""transformers' styles of modules that take tokens, the experts that each chose, and their weights."""
_refused = partial(refused_ranks, "expert")


def check_experts(model: torch.nn.Module, *, ranks: int) -> None:
    """Raise UserError: the family has no experts that can be divided, or `ranks` does not divide their number."""
    for _, part in parts_of(model):
        counts = {stack.num_experts for stack in stacks_of(part)}
        if not counts:
            family = part.config.model_type
            raise _refused(f"must be 1 for models of the family {family}, which has no plan for experts", got=ranks)
        for count in counts:
            if count % ranks:
                raise _refused(f"must divide the model's number of experts, {count}", got=ranks)


def stacks_of(model: torch.nn.Module) -> list[Any]:
    """Return the modules of experts that are whole, one of each layer with experts."""
    return [
        stack
        for _, part in parts_of(model)
        for name, style in part.ep_plan.items()
        if style in _STACKS
        for _, stack in matching(part, name)
        if not isinstance(stack, FSDPModule)
    ]


def cut_experts(stack: Any, *, mesh: DeviceMesh) -> None:  # noqa: ANN401 - each family has its own class
    """Cut the experts of a layer in place, before they are sharded; this rank keeps its own of the weights that it has. No collective.

    `mesh`: of the expert group. Names of tensors stay as they are.
    """
    for name, whole in list(stack.named_parameters(recurse=False)):
        part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
        stack.register_parameter(name, torch.nn.Parameter(part, requires_grad=whole.requires_grad))
    own = stack.num_experts // mesh.size()
    stack.num_experts = own  # the module computes these alone
    compute, group = stack.forward, mesh.get_group()

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with _own_tensors(stack):
            return _exchange(hidden, chosen, weights, compute=compute, own=own, group=group)

    stack.forward = forward


def _exchange(
    hidden_TD: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    compute: Callable[..., torch.Tensor],
    own: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return each token's weighted sum of its experts, wherever they are. A collective of the group.

    `compute`: the `own` experts of this rank; T tokens of D numbers, K experts of each.
    """
    ranks, experts_N = dist.get_world_size(group), chosen_TK.flatten()
    order_N = experts_N.argsort(stable=True)  # by expert, and so by rank
    counts = torch.bincount(experts_N, minlength=own * ranks)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sizes = torch.stack([counts, received]).view(2, ranks, own).sum(-1).tolist()
    tokens_MD = exchange_rows(hidden_TD[order_N // chosen_TK.shape[1]], *sizes, group=group)
    numbers_M = torch.arange(own, device=counts.device).repeat(ranks).repeat_interleave(received)
    computed_MD = _computed(tokens_MD, numbers_M, compute=compute)
    answers_ND = exchange_rows(computed_MD, *reversed(sizes), group=group)
    answers_TKD = answers_ND[order_N.argsort()].view(*chosen_TK.shape, -1)
    return (answers_TKD * weights_TK.unsqueeze(-1)).sum(1).to(hidden_TD.dtype)


def _computed(
    tokens_MD: torch.Tensor, numbers_M: torch.Tensor, *, compute: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Return what each token's expert computes, unweighted. Without tokens the experts still get a gradient, which FSDP sums over ranks."""
    count = len(tokens_MD)
    if not count:
        tokens_MD, numbers_M = (
            torch.nn.functional.pad(one, (0, 0) * (one.ndim - 1) + (0, 1)) for one in (tokens_MD, numbers_M)
        )
    ones = torch.ones_like(numbers_M, dtype=tokens_MD.dtype)
    return compute(tokens_MD, numbers_M.unsqueeze(-1), ones.unsqueeze(-1))[:count]


@contextmanager
def _own_tensors(stack: torch.nn.Module) -> Iterator[None]:
    """Let the module compute with this rank's experts as plain tensors; gradients reach the whole ones."""
    cut = {name: one for name, one in stack.named_parameters(recurse=False) if isinstance(one, DTensor)}
    parameters = cast("dict[str, torch.Tensor]", stack._parameters)
    parameters.update({name: one.to_local() for name, one in cut.items()})
    try:
        yield
    finally:
        parameters.update(cut)
