"""Loads models and tokenizers by directory or hub name: the only door to transformers' `Auto` classes for the workers.

Weights come as float32 unless another format is asked for. What transformers raises becomes a `UserError` of one line here. No code of a model's repository is run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from streamrl.errors import UserError, shorten

DTYPE = torch.float32
"""Number format of the weights that a trainer holds, whatever its passes compute in."""

_Loaded = TypeVar("_Loaded")


def load_tokenizer(model_path: str, *, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token (its end token where it names none)."""
    tokenizer: PreTrainedTokenizerBase = _translated(
        lambda: AutoTokenizer.from_pretrained(model_path, revision=_branch(revision)), what="tokenizer", path=model_path
    )
    if tokenizer.eos_token_id is None:
        raise UserError(
            field=f"tokenizer of {model_path}",
            rule="must name an end token, or completions never end",
            fix="set eos_token in tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(model_path: str, *, revision: str | None = None) -> PreTrainedConfig:
    """The configuration alone; no weights are read."""
    config: PreTrainedConfig = _translated(
        lambda: AutoConfig.from_pretrained(model_path, revision=_branch(revision)), what="config", path=model_path
    )
    return config


def count_parameters(model_path: str) -> int:
    """Parameters of the model that the configuration describes; nothing is allocated for them."""
    with torch.device("meta"):
        return int(load_structure(model_path).num_parameters())


def load_structure(model_path: str, *, revision: str | None = None, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """The causal language model that the configuration describes, in eval mode; its weights mean nothing yet."""
    config = load_config(model_path, revision=revision)
    model: PreTrainedModel = _translated(
        lambda: AutoModelForCausalLM.from_config(config, dtype=dtype),  # type: ignore[no-untyped-call] # untyped in transformers
        what="model",
        path=model_path,
    )
    model.train(mode=False)
    return model


def load_model(model_path: str, *, revision: str | None = None) -> PreTrainedModel:
    """The causal language model with its weights, in eval mode. Weights that are absent are refused, not made up."""
    loaded: Any = _translated(
        lambda: AutoModelForCausalLM.from_pretrained(
            model_path, revision=_branch(revision), dtype=DTYPE, output_loading_info=True
        ),
        what="model",
        path=model_path,
    )
    model: PreTrainedModel = loaded[0]
    if absent := sorted(map(str, loaded[1]["missing_keys"])):
        raise UserError(
            field=f"model {model_path}",
            rule="must hold all weights that its config names",
            got=absent,
            fix="save it again with save_pretrained",
        )
    model.train(mode=False)
    return model


def _branch(revision: str | None) -> str:
    return revision or "main"


def _translated(load: Callable[[], _Loaded], *, what: str, path: str) -> _Loaded:
    # A broken file surfaces as any exception at all: KeyError, SafetensorError, a bare Exception of the tokenizers' Rust.
    try:
        return load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            field=f"{what} of {path}",
            rule=f"cannot be loaded: {type(error).__name__}: {shorten(_first_line(error))}",
            fix="give a directory as save_pretrained writes it, or a name on the hub, of a causal language model",
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no text"
