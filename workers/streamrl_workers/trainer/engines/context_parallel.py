"""Context parallelism: the ranks of a context group share the tokens of each row; weights are sharded over them as over all ranks.

Owns: which models allow it, which ranks are a group. Does not own: the exchanges within a row (`models/row_share.py`), the mesh
(`sharding.py`), in which a group is a part of the dimension `shard`.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from streamrl.spec.training import Parallelism
from streamrl_workers.models.documents import takes_documents
from streamrl_workers.trainer.engines.tensor_parallel import refused_ranks

_BY_LENGTH = {"dynamic", "longrope"}
"""Rotary factors that transformers chooses by the largest position of a pass: that of a rank's own tokens would differ."""
_refused = partial(refused_ranks, "context", instead="each rank then has samples of its own")


def check_rows(model: PreTrainedModel, *, parallelism: Parallelism) -> None:
    """Raise UserError if ranks cannot share the rows of the model. Its weights need no values; its attention is changed."""
    config = model.config.get_text_config(decoder=True)
    family, ranks = model.config.model_type, parallelism.context
    if not takes_documents(model):
        why = "which carries state from token to token, or has an attention of its own"
        raise _refused(f"must be 1 for models of the family {family}, {why}", got=ranks)
    changing = sorted(_BY_LENGTH.intersection(_rope_types(model)))
    if changing:
        why = f"whose rotary factors change with the length ({changing[0]})"
        raise _refused(f"must be 1 for this model of the family {family}, {why}", got=ranks)
    heads = config.num_attention_heads
    if heads % parallelism.copies:
        raise _refused(f"times parallelism.tensor must divide the model's num_attention_heads, {heads}", got=ranks)


def context_group(mesh: DeviceMesh, *, ranks: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return the group of this rank: as many that follow each other in the dimension `shard`; None: each rank has rows of its own. A collective."""
    if ranks == 1:
        return None
    groups = mesh.mesh.movedim(1, -1).reshape(-1, ranks)
    own: dist.ProcessGroup
    own, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timeout)  # type: ignore[no-untyped-call] # torch's
    return own


def _rope_types(model: torch.nn.Module) -> Iterator[str]:
    """Yield the kinds of rotary factors; some models have one for each kind of layer."""
    for module in model.modules():
        found = getattr(module, "rope_type", ())
        yield from found.values() if isinstance(found, dict) else [found] if found else ()
