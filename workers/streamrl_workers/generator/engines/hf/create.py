"""Builds the transformers engine from a model folder, on the GPU where there is one."""

from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.generator.engines.hf.support import check_supported
from streamrl_workers.models.load import load_structure, load_tokenizer

_DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
"""What the trainer publishes under each precision: bytes are taken as they come, never converted."""


def create(
    *,
    model_path: str,
    slots: int,
    max_total_tokens: int | None,
    threads: int | None,
    add_special_tokens: bool = True,
    precision: Literal["FP32", "BF16"] = "FP32",
) -> HfEngine:
    """The engine, without weights: they come by `load_weights`. `add_special_tokens`: to prompts, as the tokenizer does."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_structure(model_path, dtype=_DTYPES[precision])
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type] # transformers types it away
    tokenizer = load_tokenizer(model_path)
    return build(
        model=model,
        tokenizer=tokenizer,
        slots=slots,
        max_total_tokens=max_total_tokens,
        add_special_tokens=add_special_tokens,
    )


def build(
    *,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    slots: int,
    max_total_tokens: int | None,
    add_special_tokens: bool = True,
) -> HfEngine:
    """The engine over a model and a tokenizer at hand; the model becomes the engine's own."""
    check_supported(model)
    return HfEngine(
        model=model,
        tokenizer=tokenizer,
        slots=slots,
        limit_tokens=_limit_tokens(model.config, max_total_tokens),
        end_ids=_end_ids(model, tokenizer),
        add_special_tokens=add_special_tokens,
    )


def _limit_tokens(config: PreTrainedConfig, max_total_tokens: int | None) -> int:
    """Prompt and completion together: what the model has positions for, or less if so asked."""
    positions: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    bounds = [bound for bound in (positions, max_total_tokens) if bound is not None]
    if not bounds:
        raise ValueError(f"model_type {config.model_type!r} names no max_position_embeddings; give max_total_tokens")
    return min(bounds)


def _end_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """End-of-sequence tokens of the generation settings and of the tokenizer."""
    named = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = named if isinstance(named, list) else [named]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)
