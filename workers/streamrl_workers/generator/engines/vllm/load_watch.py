"""Watches vLLM load weights: which parameter received how much, which tensor went where.

vLLM leaves out in silence what its loaders do not know: a bias, an expert, a tensor of another name. Some models copy into parameters
without a loader; vLLM's layer-wise reload does not see that, and puts the old values back. So every copy into a parameter is seen here,
and those without a loader are made where they count. Owns neither the reload (vLLM's) nor what becomes of a fault (`weight_engine.py`).

Used between `initialize_layerwise_reload` and `finalize_layerwise_reload`, in which the parameters are on the device `meta`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

_SHOWN_NAMES = 3
_LAYERWISE_LOADER = "online_process_loader"
"""Name that vLLM gives to the loaders of a layer-wise reload, and looks for when it unwraps them."""


@dataclass(slots=True, kw_only=True)
class _Parameter:
    module: torch.nn.Module
    name: str  # in the module
    path: str  # in the model
    expected: int  # elements
    received: int = 0

    @property
    def complete(self) -> bool:
        return self.received >= self.expected


def tied_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Return a number for each parameter by name, equal for those that are one tensor. Before the reload begins: it parts them."""
    return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


class LoadWatch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Sees every copy while it is entered."""

    def __init__(self, model: torch.nn.Module, *, tied: Mapping[str, int]) -> None:
        """`tied`: of `tied_parameters`."""
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._tied = tied
        self._parameters: dict[int, _Parameter] = {}  # by storage
        self._unused: dict[int, tuple[str, torch.Tensor]] = {}  # by storage, which their tensors keep from being reused
        self._current: tuple[str, torch.Tensor] | None = None
        self._in_loader = False
        for prefix, module in model.named_modules():
            if is_deferred_attention_layer(module):  # scales of the cache, which no checkpoint must have
                continue
            for name, parameter in module.named_parameters(recurse=False):
                path, expected = f"{prefix}.{name}" if prefix else name, _expected(module, parameter)
                found = _Parameter(module=module, name=name, path=path, expected=expected)
                self._parameters[_storage(parameter)] = found
                self._watch_loader(module, parameter)

    @property
    def current(self) -> str:
        """The tensor that is loaded now, or was last."""
        return "" if self._current is None else self._current[0]

    def watched(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass tensors on to vLLM."""
        for self._current in tensors:
            self._unused[_storage(self._current[1])] = self._current
            yield self._current

    def fault(self) -> str | None:
        """Return what was left out, after all is loaded; None: nothing."""
        whole = {self._tensor_of(found) for found in self._parameters.values() if found.complete}
        missing = [
            found.path
            for found in self._parameters.values()
            if not found.complete and self._tensor_of(found) not in whole
        ]
        if missing:
            return f"vLLM's parameters received not all of their values: {_few(missing)}"
        if self._unused and get_pp_group().world_size == 1:  # else other ranks have the other layers
            return f"vLLM has no place for {_few([name for name, _ in self._unused.values()])}"
        return None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        del types
        if func is torch.ops.aten.copy_.default:
            found = self._parameters.get(_storage(args[0]))
            if found is not None:
                found.received += args[0].numel()
                self._use(args[1])
                if args[0].is_meta and not self._in_loader:
                    return self._copied(found, *args[:2])
        return func(*args, **(kwargs or {}))

    def _copied(self, found: _Parameter, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Make a copy that no loader makes, in memory; with the module's last one it takes effect."""
        info = get_layerwise_info(found.module)
        materialize_layer(found.module, info)
        real: torch.Tensor = getattr(found.module, found.name)
        real.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
        others = (other for other in self._parameters.values() if other.module is found.module)
        if all(other.complete for other in others):
            _layerwise_process(found.module, info)
        return target

    def _use(self, source: torch.Tensor | None) -> None:
        """Note that a tensor was used: that of which `source` is a part, else (it may be a copy) the one that is loaded now."""
        if source is not None and self._unused.pop(_storage(source), None) is not None:
            return
        if self._current is not None:
            self._unused.pop(_storage(self._current[1]), None)

    def _tensor_of(self, found: _Parameter) -> int | str:
        """Return what tied parameters have in common."""
        return self._tied.get(found.path, found.path)

    def _watch_loader(self, module: torch.nn.Module, parameter: torch.nn.Parameter) -> None:
        loader: Callable[..., Any] | None = getattr(parameter, "weight_loader", None)
        if loader is None or getattr(loader, "__name__", "") != _LAYERWISE_LOADER:
            return

        @functools.wraps(loader)
        def watched(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the loader's own
            if get_layerwise_info(module).can_load():
                self._use(None)  # a rank that has other experts copies nothing
            self._in_loader = True
            try:
                return loader(*args, **kwargs)
            finally:
                self._in_loader = False

        parameter.weight_loader = watched  # type: ignore[attr-defined] # as vLLM does


def _expected(module: torch.nn.Module, parameter: torch.nn.Parameter) -> int:
    """Return the elements that a checkpoint has of a parameter; a vocabulary is padded beyond it."""
    if not isinstance(module, VocabParallelEmbedding):
        return int(get_tensor_load_numel(parameter))
    shard = module.shard_indices
    rows = shard.org_vocab_end_index - shard.org_vocab_start_index
    return int(parameter.numel() // parameter.shape[0] * rows)


def _storage(tensor: torch.Tensor) -> int:
    """Return what a tensor and its views have in common; on the device `meta` there are no addresses."""
    return int(tensor.untyped_storage()._cdata)


def _few(names: list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
