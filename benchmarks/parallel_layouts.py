"""What a rank of each layout sends in a step, and what its memory holds at the peak, beside the textbook's numbers and the memory estimate.

    python benchmarks/parallel_layouts.py [LAYOUT...]      # docs/benchmarks/engines.md; a layout as `context=2`

Real ranks over gloo, a Qwen3 (a Qwen3-MoE for `expert`) in float32, two passes of several samples, then an update. Bytes are counted at each
collective that torch dispatches in the second step, as a ring sends them: n ranks send (n - 1) / n of what they gather, scatter or
exchange, and twice that of what they sum. The peak is of the tensors that live at once in the second step: what was there before, and what
each operator of torch returns. (torch's own memory tracker stops at a forward pass without gradients.)

The textbook counts in a step, for W weights of which a rank's tensor part is sharded over n ranks, T tokens of a data rank, hidden size H:

    shards     3 W a pass: gathered forward and backward, gradients scattered
    replicate  2 W / n a pass: sums of gradients
    tensor     4 sums of T x H a layer, and logits gathered twice
    context    queries, keys, values and outputs to the other heads and back, forward and backward
    expert     each token to K experts and back, forward and backward
"""

import os
import subprocess
import sys
import tempfile
import weakref
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_engine import save_tokenizer

from streamrl.memory import rank_memory
from streamrl.spec import parse_job
from streamrl_workers.trainer.engines.memory import sizes_of
from streamrl_workers.trainer.engines.packing import PackedSample, Update
from streamrl_workers.trainer.engines.sharding import local
from streamrl_workers.trainer.engines.torch_engine import build_models
from streamrl_workers.trainer.engines.worker import RankWorker

LAYOUTS = ("shard=2", "replicate=2", "tensor=2", "context=2", "expert=2", "shard=2,tensor=2", "shard=2,context=2")
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS, HEAD, VOCABULARY = 512, 1536, 8, 8, 4, 64, 4096
EXPERTS, CHOSEN, EXPERT_WIDTH = 8, 2, 768
TOKENS, SAMPLES = 1024, 2
"""Of a sample; of a pass on a data rank."""
PASSES, MIB = 2, 2**20
"""Of a step."""
NUMBER = 4
"""Bytes in float32."""
AXES = ("replicate", "shard", "tensor", "context", "expert")


class Counted(TorchDispatchMode):
    """Counts the bytes that this rank sends, by kind of collective, and those of the tensors that live at once."""

    def __init__(self, present: Iterable[torch.Tensor]) -> None:
        """`present`: tensors that are there already."""
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for tensor in present:
            self._add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name = func.__name__.partition(".")[0]
        if func.namespace in {"c10d", "_c10d_functional"} and (kind := _kind(name)):
            self.sent[kind] += _sent(name, [*args, *(kwargs or {}).values()])
        found = func(*args, **(kwargs or {}))
        for tensor in _tensors([found, *args]):
            self._add(tensor)
        storages = [one() for one in self._live.values()]
        self.peak = max(self.peak, sum(one.nbytes() for one in storages if one is not None))
        return found

    def _add(self, tensor: torch.Tensor) -> None:
        storage = local(tensor).untyped_storage()
        if storage._cdata not in self._live or self._live[storage._cdata]() is None:
            self._live[storage._cdata] = weakref.ref(storage)


def _kind(name: str) -> str:
    """Return the kind of collective; empty: it is none."""
    plain = name.replace("_", "")
    known = {"allgather": "gather", "reducescatter": "scatter", "allreduce": "sum", "alltoall": "exchange"}
    return next((kind for part, kind in known.items() if part in plain), "")


def _sent(name: str, args: Sequence[Any]) -> int:
    """Bytes of a ring; of an exchange those of the other ranks' parts."""
    group = _group(args)
    size, kind = group.size(), _kind(name)
    tensors = [one for arg in args for one in _tensors(arg)]
    largest = max((one.nbytes for one in tensors), default=0)
    if kind == "sum":
        return int(sum(one.nbytes for one in tensors) * 2 * (size - 1) / size)
    if kind == "gather" and "functional" not in name and len(tensors) == 1:
        return largest * (size - 1)  # the functional one has its part alone
    if kind == "exchange":
        splits = [arg for arg in args if isinstance(arg, list) and arg and isinstance(arg[0], int)]
        sent = tensors[-1]
        if splits:
            others = sum(splits[-1]) - splits[-1][group.rank()]
            return int(sent[:1].nbytes * others) if len(sent) else 0
        return int(sent.nbytes * (size - 1) / size)
    return int(largest * (size - 1) / size)


def _tensors(arg: Any) -> list[torch.Tensor]:  # noqa: ANN401 - of any operator
    if isinstance(arg, torch.Tensor):
        return [arg]
    return [one for part in arg for one in _tensors(part)] if isinstance(arg, (list, tuple)) else []


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, str) and arg.isdigit():
            return dist.distributed_c10d._resolve_process_group(arg)
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except RuntimeError:
                continue
    return dist.group.WORLD


def main(layouts: Sequence[str]) -> None:
    """One layout after the other."""
    print(
        "| layout | kind | sent, MiB a step | textbook | peak, MiB | estimate |\n|---|---|---|---|---|---|", flush=True
    )
    for layout in layouts:
        given = sizes_in(layout)
        size = prod(given.values())
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder) / "model", experts=given["expert"] > 1)
            environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, __file__, "rank", folder, layout]
            ranks = [subprocess.Popen([*command, str(rank), str(size)], env=environ) for rank in range(size)]
            if any(rank.wait() for rank in ranks):
                raise SystemExit(f"{layout}: a rank has failed")


def sizes_in(layout: str) -> dict[str, int]:
    """Return the size of each axis."""
    given = (one.split("=") for one in layout.split(","))
    return dict.fromkeys(AXES, 1) | {axis: int(number) for axis, number in given}


def save(folder: Path, *, experts: bool) -> None:
    """Write a model with random weights."""
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }
    if experts:
        sizes |= {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": EXPERT_WIDTH}
    config = AutoConfig.for_model("qwen3_moe" if experts else "qwen3", **sizes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)


def measure(folder: Path, layout: str, rank: int, size: int) -> None:
    """Train two steps as one rank; rank 0 prints."""
    torch.set_num_threads(1)
    given = sizes_in(layout)
    parallelism = {axis: number for axis, number in given.items() if axis != "shard"}
    spec = parse_job(_job(size, parallelism)).spec
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    shards = given["shard"] * given["context"] * given["expert"]
    mesh = init_device_mesh(
        "cpu", (given["replicate"], shards, given["tensor"]), mesh_dim_names=("replicate", "shard", "tensor")
    )
    models = build_models(spec, model_path=str(folder / "model"), device=torch.device("cpu"), mesh=mesh)
    worker = RankWorker(models, spec=spec)
    place = rank // (given["context"] * given["tensor"])
    _step(worker, 0, place=place)
    counted = Counted(_present(worker, models.model))
    with counted:
        _step(worker, 1, place=place)
    if rank == 0:
        sizes = sizes_of(str(folder / "model"), trainer=spec.trainer)
        need = rank_memory(sizes, trainer=spec.trainer, task=spec.task, frozen_parameters=0, critic=False)
        expected = textbook(given, sizes.parameters, sizes.experts)
        peaks = f"{counted.peak / MIB:,.0f} | {(need.all - need.publishing) / MIB:,.0f}"  # nothing is published here
        for kind in sorted({*counted.sent, *expected}):
            sent, wanted = counted.sent[kind] / MIB, expected.get(kind, 0) / MIB
            print(f"| {layout} | {kind} | {sent:,.1f} | {wanted:,.1f} | {peaks} |", flush=True)
            peaks = " | "
    dist.destroy_process_group()


def _present(worker: RankWorker, model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield weights, gradients, moments and buffers."""
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        yield from worker._optimiser.moments(parameter).values()
    yield from model.buffers()


def textbook(given: Mapping[str, int], weights: int, experts: int) -> dict[str, float]:
    """Return the bytes of a step by kind of collective."""
    n, t, c, e, r = (
        given["shard"] * given["context"] * given["expert"],
        given["tensor"],
        given["context"],
        given["expert"],
        given["replicate"],
    )
    dense, tokens = (weights - experts) / t, SAMPLES * TOKENS
    part = (n - 1) / n * dense + ((n / e - 1) / (n / e) * experts / e if experts else 0)
    layers = {
        "gather": 2 * part + (2 * tokens * VOCABULARY * (t - 1) / t if t > 1 else 0),
        "scatter": part,
        "sum": 2 * (r - 1) / r * dense / n + 2 * (t - 1) / t * 4 * LAYERS * tokens * HIDDEN,
        "exchange": 2 * LAYERS * tokens / c * (2 * HEADS + 2 * KV_HEADS) * HEAD * (c - 1) / c
        + 4 * LAYERS * tokens * CHOSEN * HIDDEN * (e - 1) / e,
    }
    return {kind: number * NUMBER * PASSES for kind, number in layers.items() if number}


def _step(worker: RankWorker, step: int, *, place: int) -> None:
    worker.begin(None)
    for number in range(PASSES):
        worker.accumulate([_sample(1000 * place + 10 * step + number * SAMPLES + one) for one in range(SAMPLES)])
    worker.update(Update(step=step, scale=0.1, critic_scale=0.1))


def _sample(seed: int) -> PackedSample:
    tokens = [(7919 * (place + seed)) % VOCABULARY for place in range(TOKENS + 1)]
    return PackedSample(
        group_id=seed,
        index=0,
        tokens=array("i", tokens),
        places_N=array("i", range(1, TOKENS + 1)),
        behaviour_N=array("f", [-8.0] * TOKENS),
        advantages_N=array("d", [1.0] * TOKENS),
    )


def _job(size: int, parallelism: Mapping[str, int]) -> dict[str, Any]:
    return {
        "apiVersion": "streamrl.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "layouts"},
        "spec": {
            "model": {"path": {"directory": "model"}},
            "task": {
                "dataset": {"reasoningGym": {"name": "chain_sum"}},
                "sampling": {"maxTokens": TOKENS - 1},
                "rewards": [{"name": "answer", "verifier": {}}],
            },
            "pipeline": {"batchGroups": 1, "steps": 10},
            "generators": [{"name": "g", "engine": {"hf": {}}}],
            "trainer": {
                "processesPerNode": size,
                "parallelism": dict(parallelism),
                "microBatchTokens": SAMPLES * TOKENS,
                "microBatchLayout": "Packed",
            },
        },
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        measure(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    else:
        main(sys.argv[1:] or LAYOUTS)
