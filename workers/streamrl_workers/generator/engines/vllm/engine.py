"""The engine `vllm`: tokens in, tokens out, one request a sample, weights in place.

Owns which request has a slot and what its tokens mean. Does not own vLLM's processes and calls (`async_engine.py`), what they are
started with (`options.py`), the worker's side of an update (`weight_engine.py`).

- Log-probs are log-softmax at the sampling temperature. With top-p or top-k vLLM gives them behind both, which is not the contract: refused.
- A request's priority is its age: what the scheduler issued first goes on first where keys and values do not fit.
- A continuation draws new numbers: its seed is mixed with where it begins.

Invariants: those of `Engine`. An update forgets keys and values of the old weights: they are computed anew.
"""

import itertools
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from prometheus_client import REGISTRY, Metric, generate_latest
from transformers import PreTrainedConfig
from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import VllmEngineSpec as VllmSpec
from streamrl_workers.answer_ends import end_tokens
from streamrl_workers.generator.engines.base import Delta, EngineOptions, KvLoad, LoadPart
from streamrl_workers.generator.engines.requests import (
    ActiveSequence,
    Requests,
    limit_tokens,
)
from streamrl_workers.generator.engines.vllm.adapters import write_adapters
from streamrl_workers.generator.engines.vllm.async_engine import AsyncEngine, Output, Submission, WeightUpdate
from streamrl_workers.generator.engines.vllm.options import engine_arguments, refuse_latent_attention_on_cpus
from streamrl_workers.generator.engines.vllm.plugin import file_identity
from streamrl_workers.models.checkpoint_layout import CheckpointLayout
from streamrl_workers.models.load import DTYPES, load_structure, load_tokenizer
from streamrl_workers.models.published import Adapter, Parameters, is_loaded, split
from streamrl_workers.models.rope import rope_switch
from streamrl_workers.models.side_path import side_path_of
from streamrl_workers.weights.hashing import TensorBytes
from streamrl_workers.weights.shared_memory import shared, shared_part

_STEP_S = 0.2
"""How long a step waits for tokens: commands wait behind it."""
_MASK_63 = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""Sets the seeds of continuations apart."""
_ALIGNMENT_BYTES = 64
"""Of a tensor that is copied into shared memory."""


class _Metrics:
    """vLLM's metrics, without those of the process that share its registry, each with the labels of this generator."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.name.startswith("vllm:"):
                metric.samples = [one._replace(labels=one.labels | self._labels) for one in metric.samples]
                yield metric


class VllmEngine:
    """`AsyncLLM` behind the `Engine` protocol."""

    def __init__(
        self,
        core: AsyncEngine,
        *,
        slots: int,
        requests: Requests,
        checked: Parameters,
        labels: Mapping[str, str],
    ) -> None:
        """`core` has started; its weights mean nothing yet."""
        self.slots = slots
        self.version: int | None = None
        self._core = core
        self._requests = requests
        self._expected = checked
        self._base: Mapping[str, TensorBytes] = {}
        """In vLLM, if it came with adapters: the pull holds its buffers too."""
        self._metrics = _Metrics(labels)
        self._sequences: dict[int, ActiveSequence] = {}  # by lease
        self._age = itertools.count()
        self.load_parts: Mapping[LoadPart, float] = {}

    def active(self) -> int:
        return len(self._sequences)

    def pinned_active(self) -> int:
        return sum(seq.request.pinned for seq in self._sequences.values())

    def free(self) -> int:
        return self.slots - len(self._sequences)

    def pause(self, *, paused: bool) -> None:
        del paused

    def step_seconds(self) -> float:
        return 0.0

    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        assert self.version is not None, "requests were added before weights"
        assert len(requests) <= self.free(), "more requests than free slots"
        results = [self._requests.admit(request, version=self.version) for request in requests]
        admitted = [result for result in results if isinstance(result, ActiveSequence)]
        self._sequences.update({seq.request.lease: seq for seq in admitted})
        self._core.submit([self._submission(seq) for seq in admitted])
        return [result for result in results if isinstance(result, Delta)]

    def step(self) -> list[Delta]:
        return self._deltas(self._core.outputs(timeout_s=_STEP_S))

    def cancel(self, leases: Collection[int]) -> None:
        known = [lease for lease in leases if self._sequences.pop(lease, None) is not None]
        self._core.cancel(known)

    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        base, adapters = split(tensors)
        self._expected.check(base)
        known = bool(adapters) and is_loaded(base, loaded=self._base)
        begun_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="streamrl-adapters-") as folder:
            update = _update(None if known else base, adapters=adapters, folder=Path(folder) / "adapters")
            paused_s = time.monotonic()  # until here it has generated on
            self._core.pause()
            late = self._deltas(self._core.outputs(timeout_s=0.0))
            held_s = time.monotonic()
            self._core.update(update, version=version)
        ended_s = time.monotonic()
        self.load_parts = {"copy": paused_s - begun_s, "pause": held_s - paused_s, "load": ended_s - held_s}
        self.version = version
        self._base = base if adapters else {}
        return late

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return self._core.score(sequences)

    def kv_load(self) -> KvLoad | None:
        return self._core.kv_load()

    def metrics(self) -> bytes:
        return generate_latest(self._metrics)

    def close(self) -> None:
        self._core.close()

    def _submission(self, seq: ActiveSequence) -> Submission:
        request = seq.request
        return Submission(
            lease=request.lease,
            tokens=seq.tokens,
            priority=next(self._age),
            traceparent=request.traceparent,
            params=sampling_params(
                request.sampling,
                end_ids=self._requests.end_ids,
                max_tokens=seq.limit - len(seq.completion),
                seed=(request.seed + len(seq.completion) * _GOLDEN) & _MASK_63,
            ),
        )

    def _deltas(self, outputs: Sequence[Output]) -> list[Delta]:
        deltas, extend = [], self._requests.extend
        for output in outputs:
            lease, tokens, logprobs, version, ended, _ = output
            seq = self._sequences.get(lease)
            if seq is None:  # cancelled, or it had ended before
                continue
            if tokens and not ended:
                delta = extend(seq, tokens=tokens, logprobs=logprobs, version=version)
            else:
                delta = self._delta(seq, output)
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._sequences[lease]
                if not ended:  # at a stop string: vLLM knows no text
                    self._core.cancel([lease])
        return deltas

    def _delta(self, seq: ActiveSequence, output: Output) -> Delta:
        assert self.version is not None
        version = output.version if output.tokens else self.version
        if output.error is not None:
            return self._requests.failed(seq, f"vLLM: {output.error}", version=version)
        delta = self._requests.extend(seq, tokens=output.tokens, logprobs=output.logprobs, version=version)
        if output.ended and delta.finish_reason is None:
            return self._requests.failed(seq, "vLLM ended it early", version=version)
        return delta


def sampling_params(sampling: pb.Sampling, *, end_ids: frozenset[int], max_tokens: int, seed: int) -> SamplingParams:
    """vLLM's parameters of one sample. Without its text: stop strings are looked for behind it."""
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=max_tokens,
        seed=seed,
        stop_token_ids=sorted(end_ids),
        ignore_eos=True,  # the end tokens are given above
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _update(base: Mapping[str, TensorBytes] | None, *, adapters: Mapping[str, Adapter], folder: Path) -> WeightUpdate:
    """Return what vLLM is to load: the base where the pull has put it, adapters in files.

    Tensors that the pull has not put into shared memory, as those that adapters were merged into, are copied there.
    """
    tensors = _in_shared_memory({} if base is None else base)
    parts = {name: shared_part(tensor.data) for name, tensor in tensors.items()}
    memories = list({part[0]: None for part in parts.values() if part is not None})
    places = []
    for name, (dtype, shape, _) in sorted(tensors.items()):
        memory, offset = parts[name] or (None, 0)
        places.append((name, dtype, list(shape), -1 if memory is None else memories.index(memory), offset))
    size_bytes = sum(tensor.data.nbytes for tensor in tensors.values())
    if adapters:
        size_bytes += write_adapters(folder, adapters)
    return WeightUpdate(
        memories=memories,
        identities=[file_identity(Path(memory.path)) for memory in memories],
        tensors=places,
        adapters=folder if adapters else None,
        size_bytes=size_bytes,
    )


def _in_shared_memory(tensors: Mapping[str, TensorBytes]) -> dict[str, TensorBytes]:
    """Return the tensors with those copied that lie elsewhere. One without bytes has no place."""
    apart = {name: one for name, one in tensors.items() if one.data.nbytes and shared_part(one.data) is None}
    sizes = [-(-one.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for one in apart.values()]
    memory = shared(sum(sizes))
    found = dict(tensors)
    for (name, one), end in zip(apart.items(), itertools.accumulate(sizes), strict=True):
        begin = end - -(-one.data.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        target = memory[begin : begin + one.data.nbytes]
        target[:] = one.data.cast("B")
        found[name] = one._replace(data=target)
    return found


def _limit_tokens(config: PreTrainedConfig, *, max_tokens: int) -> int:
    """Return the most tokens of prompt and completion. vLLM takes one set of rotary factors for all lengths: the short ones here."""
    limit, switch = limit_tokens(config), rope_switch(config)
    if switch is None:
        return limit
    if max_tokens >= switch:
        raise UserError(
            field="spec.task.sampling.maxTokens",
            rule=f"must be below {switch} with engine vllm, which does not switch the model's rotary factors (longrope) there",
            got=max_tokens,
            fix="lower it, or use engine hf",
        )
    return min(limit, switch)


def _adapted(options: EngineOptions, *, config: PreTrainedConfig) -> list[str]:
    """Return the layers whose adapters come beside the base, as a checkpoint names them."""
    if options.lora is None:
        return []
    from streamrl_workers.models.lora import adapted_layers  # peft is loaded where it is asked for

    assert options.model_path is not None
    layout = CheckpointLayout(config)
    layers = adapted_layers(options.model_path, options.lora)
    return [layout.name_of(f"{layer}.weight").removesuffix(".weight") for layer in layers]


def create(options: EngineOptions) -> VllmEngine:
    """Start vLLM. Raises UserError for a model or arguments that it does not take, EngineFailedError where it does not start."""
    assert options.model_path is not None and isinstance(options.spec, VllmSpec)
    with torch.device("meta"):
        model = load_structure(options.model_path, dtype=DTYPES[options.precision])
    if side_path_of(model.config) is not None:
        raise ValueError("it has a side path, which engine vllm does not compute; use engine hf")
    refuse_latent_attention_on_cpus(model.config)
    tokenizer = load_tokenizer(options.model_path)
    limit = _limit_tokens(model.config, max_tokens=options.max_tokens)
    adapted = _adapted(options, config=model.config)
    arguments = AsyncEngineArgs(**engine_arguments(options, limit_tokens=limit, adapted=adapted))
    core = AsyncEngine(arguments, probe_timeout_s=options.probe_timeout_s, failed=options.failed, adapted=adapted)
    requests = Requests(
        tokenizer=tokenizer,
        end_ids=frozenset(end_tokens(Path(options.model_path), tokenizer)),
        limit_tokens=min(limit, arguments.max_model_len or limit),
        vocabulary=model.get_input_embeddings().get_parameter("weight").shape[0],
        add_special_tokens=options.add_special_tokens,
    )
    checked = Parameters(model)
    return VllmEngine(
        core,
        slots=options.spec.slots,
        requests=requests,
        checked=checked,
        labels=options.metric_labels,
    )
