"""What vLLM is started with: the engine's arguments and its environment variables.

Some are fixed, because what the rest of the product promises rests on them; `spec` and `extraArgs` set the others.
"""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedConfig

from streamrl.errors import UserError
from streamrl.spec.base import parse_bytes
from streamrl.spec.generators import Speculation
from streamrl.spec.generators import VllmEngineSpec as VllmSpec
from streamrl.spec.training import Lora
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.vllm.plugin import PLUGIN, WEIGHT_ENGINE

_DTYPES = {"FP32": "float32", "BF16": "bfloat16"}
_BLOCK_TOKENS_CPU = 32
_KV_BYTES_CPU = 2**30
"""Where the job says nothing: of a CPU's memory vLLM would take 40 %."""


def set_environment(*, threads: int | None, traced: bool = False) -> None:
    """Environment variables of vLLM; before it is imported."""
    if traced:
        os.environ.update(
            OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf",
            OTEL_TRACES_SAMPLER="parentbased_always_off",  # else it sends a trace of each request that has no place in one
        )
        os.environ.setdefault("OTEL_SERVICE_NAME", "streamrl-vllm")
    os.environ.update(
        VLLM_PLUGINS=PLUGIN,
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",  # this process has threads and connections: a fork would copy their locks
        HF_HUB_OFFLINE="1",
        PYTHONWARNINGS="ignore:resource_tracker:UserWarning",  # what ended processes leave; the last line is for the fault
    )
    if not torch.cuda.is_available():
        os.environ.update(
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # the runner has chosen the cores
            OMP_NUM_THREADS=str(threads or torch.get_num_threads()),
            TORCHDYNAMO_DISABLE="1",  # else the first log-probs take half a minute
        )


def engine_arguments(options: EngineOptions, *, limit_tokens: int, adapted: Sequence[str] = ()) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs`.

    Args:
        options: of the engine.
        limit_tokens: prompt and completion of the model at most.
        adapted: layers that get adapters beside the base.

    Raises:
        UserError: `extraArgs` names what vLLM does not know, or what is not the job's to say; vLLM has no adapters of this rank.
    """
    spec = options.spec
    assert isinstance(spec, VllmSpec)
    fixed = {
        "model": str(Path(options.model_path or "").absolute()),
        "load_format": "dummy",  # weights come by updates
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "dtype": _DTYPES[options.precision],
        "seed": options.seed,
        "max_num_seqs": spec.max_concurrency,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "quantization": spec.quantization,
        "enable_prefix_caching": spec.prefix_caching,
        "scheduling_policy": "priority",
        "logprobs_mode": "processed_logprobs",
        "stream_interval": 1,  # tokens held back at an update would come out under the next version
        "disable_log_stats": False,
        "weight_transfer_config": {"backend": WEIGHT_ENGINE},
        "otlp_traces_endpoint": options.traces_endpoint,
        "speculative_config": _speculative(spec.speculative),
        **_adapters(options.lora, adapted),
    }
    chosen: dict[str, Any] = {"max_model_len": limit_tokens, "gpu_memory_utilization": spec.gpu_memory_percent / 100}
    if spec.kv_cache_bytes is not None:
        chosen["kv_cache_memory_bytes"] = parse_bytes(spec.kv_cache_bytes)
    if not torch.cuda.is_available():
        chosen |= {
            "enforce_eager": True,
            "block_size": _BLOCK_TOKENS_CPU,
            "kv_cache_memory_bytes": chosen.get("kv_cache_memory_bytes", _KV_BYTES_CPU),
            # Seeds and prefills in parts end the core on CPUs.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(limit_tokens, _PREFILL_TOKENS_CPU),
        }
    extra = _extra(spec, fixed=fixed)
    _check_length(extra.get("max_model_len", limit_tokens), limit_tokens=limit_tokens)
    return chosen | extra | fixed


def _check_length(length: object, *, limit_tokens: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= limit_tokens:
        raise UserError(
            field="engine.vllm.extraArgs.max_model_len",
            rule=f"must be tokens from 1 to {limit_tokens}, which the model has positions for",
            got=length,
            fix="lower it, or leave it out",
        )


def _adapters(lora: Lora | None, layers: Sequence[str]) -> dict[str, Any]:
    """vLLM's arguments for one adapter on these layers; without `lora` for none."""
    if lora is None:
        return {"enable_lora": False}
    from vllm.config.lora import MaxLoRARanks

    ranks = [rank for rank in get_args(MaxLoRARanks) if rank >= lora.rank]
    if not ranks:
        raise UserError(
            field="spec.trainer.lora.rank",
            rule=f"must be at most {max(get_args(MaxLoRARanks))} with engine vllm and precision BF16",
            got=lora.rank,
            fix="lower it, or take engine hf",
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(ranks),
        "lora_dtype": "auto",
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),  # no others cost time
    }


def _speculative(chosen: Speculation | None) -> dict[str, Any] | None:
    """vLLM's `SpeculativeConfig`."""
    if chosen is None:
        return None
    refuse_drafts_on_cpus(chosen)
    if chosen.ngram is not None:
        ngram = chosen.ngram
        return {
            "method": "ngram",
            "num_speculative_tokens": ngram.draft_tokens,
            "prompt_lookup_min": ngram.min_match_tokens,
            "prompt_lookup_max": ngram.max_match_tokens,
        }
    assert chosen.suffix is not None
    if importlib.util.find_spec("arctic_inference") is None:
        field = "engine.vllm.speculative.suffix"
        raise UserError(field=field, rule="needs the package arctic-inference", fix="install it, or take ngram")
    return {
        "method": "suffix",
        "num_speculative_tokens": chosen.suffix.draft_tokens,
        "suffix_decoding_max_cached_requests": chosen.suffix.cached_completions,
        "suffix_decoding_min_token_prob": chosen.suffix.min_probability_percent / 100,
    }


def refuse_drafts_on_cpus(_: Speculation) -> None:
    """vLLM's CPU build, 0.32, divides the logits of drafted tokens by memory that it never writes (`_expand_kernel_impl` fills a copy)."""
    if not torch.cuda.is_available():
        raise UserError(
            field="engine.vllm.speculative",
            rule="must be absent on CPUs: with drafts vLLM's CPU build gives wrong log-probs of sampled tokens",
            fix="leave it out",
        )


def refuse_latent_attention_on_cpus(config: PreTrainedConfig) -> None:
    """Refuse DeepSeek-V3 and its like: of their tokens behind the first vLLM's CPU build, 0.32, gives log-probs that are off by up to 2."""
    if not torch.cuda.is_available() and getattr(config, "kv_lora_rank", None) is not None:
        raise UserError(
            field="engine.vllm",
            rule="must run a model without multi-head latent attention on CPUs: vLLM's CPU build gives wrong log-probs for it",
            got=config.model_type,
            fix="take engine hf",
        )


_PREFILL_TOKENS_CPU = 4096
"""Of one step, at least."""


def _extra(spec: VllmSpec, *, fixed: dict[str, Any]) -> dict[str, Any]:
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in spec.extra_args:
        if name in fixed:
            raise UserError(field=f"engine.vllm.extraArgs.{name}", rule="is set by StreamRL", fix="leave it out")
        if name not in known:
            raise UserError(
                field=f"engine.vllm.extraArgs.{name}",
                rule="must be an argument of vLLM's AsyncEngineArgs, as gpu_memory_utilization",
            )
    return {name: _value(text) for name, text in spec.extra_args.items()}


def _value(text: str) -> Any:  # noqa: ANN401 - whatever JSON has
    """JSON where it is some, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
