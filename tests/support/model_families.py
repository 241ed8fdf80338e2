"""Tiny models of every family that people train, with random weights: one row a family."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from support.vllm_models import CHARS, tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": len(CHARS) + 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on CPUs takes no fewer
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # log-probs are spread: a wrong one shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: what its configuration says beyond the common sizes, and who runs it.

    The trainer and the engine hf run all of them.
    """

    model_type: str
    vllm_refusal: str | None = None  # the line with which vLLM's CPU build is refused; None: it runs the family
    config: Mapping[str, Any] = field(default_factory=dict)


_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {
    "query_pre_attn_scalar": 32,
    "initializer_range": 0.08,
}  # scaled embeddings that are the head too: 0.2 repeats the token

LONGROPE = "phi3_longrope"
"""A model whose rotary factors change above 32 tokens."""

FAMILIES: dict[str, Family] = {
    "llama": Family(model_type="llama", config={"tie_word_embeddings": False}),
    "qwen2": Family(model_type="qwen2", config={"tie_word_embeddings": True}),
    "qwen3": Family(model_type="qwen3", config={"tie_word_embeddings": False}),
    "gemma2": Family(model_type="gemma2", config={**_WINDOW, **_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": Family(model_type="gemma3_text", config={**_WINDOW, **_GEMMA}),
    "mistral": Family(model_type="mistral", config={"sliding_window": None}),
    "phi3": Family(model_type="phi3", config={"original_max_position_embeddings": 256}),
    LONGROPE: Family(
        model_type="phi3",
        vllm_refusal="spec.task.sampling.maxTokens: must be below 32 with engine vllm",
        config={
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [4.0] * 16,
            },
        },
    ),
    "olmo2": Family(model_type="olmo2"),
    "gpt_oss": Family(
        model_type="gpt_oss",
        config={
            **_WINDOW,
            **_EXPERTS,
            "num_local_experts": 4,
            "rope_parameters": _YARN,
        },
    ),
    "qwen3_moe": Family(
        model_type="qwen3_moe",
        config={**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "mixtral": Family(model_type="mixtral", config={**_EXPERTS, "num_local_experts": 4, "sliding_window": None}),
    "deepseek_v3": Family(
        model_type="deepseek_v3",
        vllm_refusal="engine.vllm: must run a model without multi-head latent attention on CPUs",
        config={
            "head_dim": 64,
            "num_key_value_heads": 2,
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 512,  # with the next the only sizes that vLLM's MLA knows
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "topk_method": "noaux_tc",  # in the released configuration; transformers itself does not read it
            "scoring_func": "sigmoid",
        },
    ),
}
"""Families of the default suites, by the name that tests and docs use."""

_MIXED = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
_QWEN_EXPERTS = {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True}

MORE_FAMILIES: dict[str, Family] = {
    "qwen3_5": Family(model_type="qwen3_5_text", config=_MIXED),
    "qwen3_5_moe": Family(
        model_type="qwen3_5_moe_text", config={**_MIXED, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "mistral_window": Family(model_type="mistral", config={"sliding_window": 16}),
    "phi4": Family(
        model_type="phi3",
        config={
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
        },
    ),
    "olmo3": Family(model_type="olmo3", config=_WINDOW),
    "smollm3": Family(model_type="smollm3", config={"no_rope_layers": [1, 0]}),
    "glm4": Family(model_type="glm4"),
    "granite": Family(
        model_type="granite",
        config={
            "embedding_multiplier": 6.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    "lfm2": Family(model_type="lfm2", config={"layer_types": ["conv", "full_attention"], "block_multiple_of": 16}),
    "qwen2_moe": Family(model_type="qwen2_moe", config={**_QWEN_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_next": Family(
        model_type="qwen3_next", config={**_MIXED, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 32}
    ),
    "glm4_moe": Family(
        model_type="glm4_moe",
        config={
            "num_experts_per_tok": 2,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "llama4": Family(
        model_type="llama4_text",
        config={
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 16,
            "floor_scale": 16,
        },
    ),
    "nemotron_h": Family(
        model_type="nemotron_h",
        config={
            "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
            "num_hidden_layers": 4,
            "ssm_state_size": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
}
"""Families of the table of models alone (`model_cells.py`)."""

ALL_FAMILIES = FAMILIES | MORE_FAMILIES


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a family's model."""
    row = ALL_FAMILIES[family]
    config: PreTrainedConfig = AutoConfig.for_model(row.model_type, **{**_SIZES, **row.config, **changes})
    return config


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model in float32. Parameters that start as zeros or ones (norms, biases, sinks) are moved, so that each of them shows."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.unique().numel() == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.train(mode=False)
    return model


def save_tiny(family: str, directory: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write the model, its weights and a tokenizer; returns the folder. `changes`: of the family's configuration."""
    model = tiny_model(family, seed=seed, **changes)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
