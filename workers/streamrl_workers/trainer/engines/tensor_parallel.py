"""Tensor parallelism: each rank of a tensor group holds a part of every large matrix of a block, and computes with it.

Owns: which models can be cut and how, by the family's own plan (transformers' `tp_plan`, names and styles as data); the gradients that
this leaves in parts. Does not own: how torch cuts and exchanges (`parallelize_module`), the mesh, shards (`sharding.py`).

    colwise, by rows of the weight ─▶ attention or activation, each rank its own heads or columns ─▶ rowwise, by columns ─▶ sum over ranks

- The embedding of a tied head is cut with it, by vocabulary. A head's logits are gathered over the group chunk by chunk (`logprobs.py`).
- Weights that are whole on every rank get whole gradients, but for those between the two cuts (norms of queries and keys): there each
  rank sees its own heads. These are summed over the group once for an update. A sum at each backward pass would count earlier
  micro-steps again.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from streamrl.errors import UserError

TENSOR = "tensor"
"""Name of the dimension of the mesh."""
_PARTIAL = "replicated_with_grad_allreduce"
"""Style of weights whose gradient is a part on each rank; transformers' own hook sums what has accumulated, at every backward pass."""
_STYLES: Mapping[str, tuple[Callable[[], ParallelStyle], int]] = {
    "colwise": (ColwiseParallel, 0),
    "rowwise": (RowwiseParallel, 1),
    "colwise_gather_output": (lambda: ColwiseParallel(output_layouts=Replicate()), 0),
    "rowwise_split_input": (lambda: RowwiseParallel(input_layouts=Replicate()), 1),
    "embedding_rowwise": (lambda: RowwiseParallel(input_layouts=Replicate()), 0),
}
"""torch's style by transformers' name of it, and the dimension of the weight that it cuts."""


def refused_ranks(field: str, rule: str, *, got: int, instead: str = "ranks then share by shards") -> UserError:
    """Return the error of a model that ranks cannot share by this field of `parallelism`. `instead`: what they do without the field."""
    return UserError(
        field=f"spec.trainer.parallelism.{field}", rule=rule, got=got, fix=f"lower it, or leave it out: {instead}"
    )


_refused = partial(refused_ranks, "tensor")


def cut_model(model: torch.nn.Module, *, mesh: DeviceMesh) -> None:
    """Cut the linear layers in place, before they are sharded; this rank keeps its part of the weights that it has. No collective.

    `mesh`: of the tensor group. Names of tensors stay as they are. Raises UserError as `check_cut`.
    """
    for _, part in parts_of(model):
        plan = check_cut(part, ranks=mesh.size())
        styles = {name: _STYLES[style][0]() for name, style in plan.items() if style != _PARTIAL}
        parallelize_module(part, mesh, styles, src_data_rank=None)
        part.tie_weights()  # a cut tensor is a new one, of each of the two names


def check_cut(model: PreTrainedModel, *, ranks: int) -> dict[str, str]:
    """Return the style of each layer that is cut. Raises UserError: the family cannot be cut, or not into so many parts."""
    family, config = model.config.model_type, model.config.get_text_config(decoder=True)
    plan = {name: style for name, style in model.tp_plan.items() if any(matching(model, name))}
    unknown = sorted(set(plan.values()) - {*_STYLES, _PARTIAL})
    if "rowwise" not in plan.values() and "rowwise_split_input" not in plan.values():
        raise _refused(f"must be 1 for models of the family {family}, which has no plan for it", got=ranks)
    if unknown:
        raise _refused(f"must be 1 for models of the family {family}, whose plan has {unknown[0]}", got=ranks)
    for heads in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, heads, None)
        if count and count % ranks:
            raise _refused(f"must divide the model's {heads}, {count}", got=ranks)
    for name, style in plan.items():
        for layer, module in matching(model, name) if style != _PARTIAL else ():
            size = module.get_parameter("weight").shape[_STYLES[style][1]]
            if size % ranks:
                raise _refused(f"must divide the size of {layer}, {size}", got=ranks)
    return plan


def group_of(model: torch.nn.Module) -> dist.ProcessGroup | None:
    """Return the tensor group of a cut model; None: it is not cut."""
    meshes = (p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
    return next((mesh.get_group(TENSOR) for mesh in meshes if TENSOR in (mesh.mesh_dim_names or ())), None)


def partial_gradients(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters of a cut model whose gradients are a part on each rank of a tensor group."""
    names = {
        f"{prefix}{layer}"
        for prefix, part in parts_of(model)
        for name, style in part.tp_plan.items()
        if style == _PARTIAL
        for layer, _ in matching(part, name)
    }
    return [p for name, p in model.named_parameters() if p.requires_grad and name.rpartition(".")[0] in names]


def sum_partial(gradients: Sequence[torch.Tensor], *, group: dist.ProcessGroup | None) -> None:
    """Sum this rank's parts of gradients over the tensor group, in place. A collective, with one exchange."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def parts_of(model: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, PreTrainedModel]]:
    """Yield the models of transformers in a model, the outermost ones, with the prefix of their names."""
    if isinstance(model, PreTrainedModel):
        yield prefix, model
        return
    for name, child in model.named_children():
        yield from parts_of(child, f"{prefix}{name}.")


def matching(model: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that a plan names; `*` stands for one part of a name."""
    pattern = re.compile(re.escape(name).replace(r"\*", r"[^.]+"))
    return ((found, module) for found, module in model.named_modules() if pattern.fullmatch(found))
