"""The worker's side of an update of weights: memory of the generator into the model in place.

Runs in vLLM's worker process, while nothing is generated. So nothing is hashed here: the pull has verified the bytes, and it is the very
memory that they arrived in (`file_identity`). All happens in one `update_weights` call. A fault may leave the
model half loaded: then the engine is given up (`async_engine.py`).

Invariants:
- What goes into the model lies in memory that the generator has verified (invariant 4). It is mapped so that no write here reaches it.
- Every parameter of the model is loaded whole, and every tensor is used (`load_watch.py`): an update that leaves one out is refused.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from streamrl_workers.generator.engines.vllm.adapters import check_adapted
from streamrl_workers.generator.engines.vllm.load_watch import LoadWatch, tied_parameters
from streamrl_workers.generator.engines.vllm.plugin import file_identity, refused


@dataclass
class FileInit(WeightTransferInitInfo):
    """What every version will bring."""

    adapted: list[str] = field(default_factory=list)  # layers that get adapters beside the base


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One version of the weights."""

    files: list[tuple[str, int, int, int, int]] = field(default_factory=list)  # path and `file_identity`
    tensors: list[tuple[str, str, list[int], int, int]] = field(
        default_factory=list
    )  # name, dtype, shape, file, offset


class FileWeightEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a whole version."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Raise ValueError for layers that cannot get their adapters."""
        if init_info.adapted:
            check_adapted(self.model, init_info.adapted)

    def start_weight_update(self) -> None:
        """Nothing to do: an update that has begun and not ended would break the next one."""

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the version."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update: FileUpdate) -> None:
        """Load all tensors. Raises ValueError where a file is not the one that the generator has named."""
        files = [_mapped(Path(path), identity) for path, *identity in update.files]
        self._reload(
            (name, _tensor(files, dtype=dtype, shape=shape, file=file, offset=offset))
            for name, dtype, shape, file, offset in update.tensors
        )

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """vLLM's layer-wise reload: each module is made anew as soon as its last tensor has come. Raises ValueError for what was left out."""
        tied = tied_parameters(self.model)
        initialize_layerwise_reload(self.model)
        watch = LoadWatch(self.model, tied=tied)
        try:
            with watch:
                self.model.load_weights(watch.watched(tensors))
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:  # as at every restart
            raise ValueError(refused(f"{watch.current or 'the weights'}: {type(error).__name__}: {error}")) from error
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        if fault := watch.fault():
            raise ValueError(refused(fault))
        if self.device.type == "cpu":
            self._pack_experts()
            self._pack_tied_head()

    def _pack_experts(self) -> None:
        """On CPUs vLLM packs the experts of a layer at their first load only, and computes with what it packed."""
        for module in self.model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(module)

    def _pack_tied_head(self) -> None:
        """On CPUs vLLM computes with a packed copy of each weight. A head that shares the embedding's weight has no tensor of its own
        in the file, so the reload leaves its packed copy at the old values (log-probs are off by 10)."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        embeddings = {
            module.weight.data_ptr() for module in self.model.modules() if type(module) is VocabParallelEmbedding
        }
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _mapped(path: Path, identity: list[int]) -> mmap.mmap:
    """Map a file; what is written to the mapping stays in this process."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if file_identity(path) != identity:
            raise ValueError("the memory of weights is another one than the generator has named, or was changed")
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)


def _tensor(files: Sequence[mmap.mmap], *, dtype: str, shape: list[int], file: int, offset: int) -> torch.Tensor:
    """Return a tensor that lies in the file; one without elements lies in none."""
    kind: torch.dtype = getattr(torch, dtype)
    if not prod(shape):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(files[file], dtype=kind, count=prod(shape), offset=offset).view(shape)
