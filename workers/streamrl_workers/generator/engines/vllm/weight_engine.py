"""The worker's side of an update of weights: a file on the generator's own disk or shared memory, verified, into the model in place.

Runs in vLLM's worker process. All happens in one `update_weights` call: a file that is wrong is refused before the model is touched, so the
old weights stay servable. A fault later leaves the model half loaded: then the engine is given up (`async_engine.py`).

Invariant: the bytes that go into the model are those that were hashed here, and their hash is the published one (invariant 4).
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)

from streamrl_workers.generator.engines.vllm.plugin import REFUSED
from streamrl_workers.models.published import as_bytes
from streamrl_workers.weights.hashing import tensors_hash


@dataclass
class FileInit(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """One version of the weights."""

    path: str = ""  # of a safetensors file with all tensors
    hash: str = ""  # of its tensors, in hexadecimal (`weights/hashing.py`)
    names: list[str] = field(default_factory=list)  # under which they were published


class FileWeightEngine(WeightTransferEngine[FileInit, FileUpdate]):
    """Loads a whole version from one file."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Nothing to do: an update that has begun and not ended would break the next one."""

    def finish_weight_update(self) -> None:
        """Nothing to do."""

    def shutdown(self) -> None:
        """Nothing to do."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Verify, then load."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update: FileUpdate) -> None:
        """Verify, then load.

        Raises:
            ValueError: beginning with `REFUSED`; the old weights are whole.
        """
        with ExitStack() as stack:
            file = stack.enter_context(safe_open(update.path, framework="pt", device="cpu"))
            tensors = {name: file.get_tensor(name) for name in update.names}
            got = tensors_hash({name: as_bytes(tensor) for name, tensor in tensors.items()}).hex()
            if got != update.hash:
                raise ValueError(f"{REFUSED}: the file's tensors hash to {got}, published was {update.hash}")
            self._reload(iter(tensors.items()))

    def _reload(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """vLLM's layer-wise reload: each module is made anew as soon as its last tensor has come."""
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)
            partly = [name for name, module in self.model.named_modules() if _partly_loaded(module)]
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        if partly:
            raise RuntimeError(f"modules were loaded in part only: {', '.join(partly[:4])}")
        if self.device.type == "cpu":
            self._pack_tied_head()

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


def _partly_loaded(module: torch.nn.Module) -> bool:
    """Some, but not all of the module's values have come. An embedding is padded beyond the vocabulary, so never whole."""
    info = get_layerwise_info(module)
    return 0 < info.load_numel < (info.load_numel_total or 0) and not isinstance(module, VocabParallelEmbedding)
