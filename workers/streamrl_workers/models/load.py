"""Loads models and tokenizers by directory or hub name: the only door to transformers' `Auto` classes and to huggingface_hub.

Weights come as float32 unless another format is asked for. What these libraries raise becomes a `UserError` of one line here.
No code of a model's repository is run, whatever a terminal would answer: a model that needs it is refused. Weights come from safetensors
alone, no pickle is opened, and what a folder names lies in it: no other file, no adapter's base, no attention of the hub.
A downloaded directory holds exactly the revision asked for, so trainer and generators read the same files.
"""

import copy
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from streamrl.errors import UserError, shorten
from streamrl.files import read_json
from streamrl.spec.model import HuggingFaceModel
from streamrl_workers.models.rope import switch_by_document
from streamrl_workers.models.side_path import complete_structure, load_with_side_path, side_path_of

DTYPE = torch.float32
"""Number format of the weights that a trainer holds, whatever its passes compute in."""

DTYPES = {"FP32": torch.float32, "BF16": torch.bfloat16}
"""What the trainer publishes under each precision: engines take the bytes as they come, never converted."""

_Loaded = TypeVar("_Loaded")

_SAFE: dict[str, Any] = {"trust_remote_code": False}
"""Of every load: left out, transformers asks on a terminal whether to run a repository's code."""
MODEL_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Config, weights and tokenizer; no pickles, no code, no duplicates in other formats."""
_WEIGHTS: dict[str, Any] = {**_SAFE, "use_safetensors": True}
"""Of every load of weights."""
_INDEX, _ADAPTER = "model.safetensors.index.json", "adapter_config.json"
_MOST_INDEX_BYTES = 2**27
"""Maximum size of an index: of a million tensors."""
_WANTS_TRUST = "trust_remote_code"
"""In what transformers says when a model needs code of its repository."""


def load_tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """The tokenizer, with a pad token (its end token where it names none)."""
    tokenizer = _tokenizer(model_path)
    if tokenizer.eos_token_id is None:
        raise UserError(
            field=f"tokenizer of {model_path}",
            rule="must name an end token, or completions never end",
            fix="set eos_token in tokenizer_config.json",
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(model_path: str) -> PreTrainedConfig:
    """The configuration alone; no weights are read."""
    _check_names(Path(model_path))
    config: PreTrainedConfig = _translated(
        lambda: AutoConfig.from_pretrained(model_path, **_SAFE),
        what="config",
        path=model_path,
    )
    config._attn_implementation = None  # the folder's word may be code of the hub; `attention_of` has the choice
    return config


def _check_names(directory: Path) -> None:
    """Refuse what would make transformers read other files than weights of this folder."""
    if (directory / _ADAPTER).is_file():
        raise UserError(
            field=f"model {directory}",
            rule=f"must be a whole model, and holds an adapter ({_ADAPTER})",
            fix="merge it into its base (merge_and_unload), and save that with save_pretrained",
        )
    if not (directory / _INDEX).is_file():
        return
    index = read_json(directory / _INDEX, most_bytes=_MOST_INDEX_BYTES)
    shards = index.get("weight_map") if isinstance(index, dict) else None
    for shard in shards.values() if isinstance(shards, dict) else ():
        if not isinstance(shard, str) or PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise UserError(
                field=str(directory / _INDEX),
                rule="must name *.safetensors in its own folder",
                got=shard,
                fix="save the model again with save_pretrained",
            )


def count_parameters(model_path: str) -> int:
    """Parameters of the model that the configuration describes; nothing is allocated for them."""
    with torch.device("meta"):
        return int(load_structure(model_path).num_parameters())


def load_structure(model_path: str, *, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """The causal language model that the configuration describes, in eval mode; its weights mean nothing yet."""
    config = load_config(model_path)
    model = _translated(lambda: structure_of(config, dtype=dtype), what="model", path=model_path)
    model.train(mode=False)
    return model


def structure_of(config: PreTrainedConfig, *, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """Return the causal language model of a copy of `config`, in which transformers sets its attention; its weights mean nothing yet."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # untyped in transformers
        copy.deepcopy(config), dtype=dtype, attn_implementation=attention_of(config), **_SAFE
    )
    complete_structure(model)
    switch_by_document(model)
    return model


def attention_of(config: PreTrainedConfig) -> str | None:
    """Return the attention that computes all that the model asks for; None: the default of transformers does.

    transformers takes `sdpa`, which leaves out the soft cap of attention logits (Gemma 2) without a word.
    """
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return None if capped is None else "eager"


def load_empty(model_path: str) -> PreTrainedModel:
    """The model without its weights, which another process brings: they take no memory until they are written."""
    with no_init_weights():
        model = load_structure(model_path)
    model.tie_weights()  # part of what was left out
    return model


def load_model(model_path: str) -> PreTrainedModel:
    """The causal language model with its weights, in eval mode. Weights that are absent are refused, not made up."""
    config = load_config(model_path)
    if side_path_of(config) is not None:
        built = load_structure(model_path)
        _translated(lambda: load_with_side_path(built, model_path), what="model", path=model_path)
        return built
    loaded: Any = _translated(
        lambda: AutoModelForCausalLM.from_pretrained(
            model_path,
            config=config,
            dtype=DTYPE,
            attn_implementation=attention_of(config),
            output_loading_info=True,
            **_WEIGHTS,
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
    switch_by_document(model)
    model.train(mode=False)
    return model


def load_encoder(model_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Any model without its language head, and its tokenizer as it is."""
    config = load_config(model_path)
    model: PreTrainedModel = _translated(
        lambda: AutoModel.from_pretrained(model_path, config=config, dtype=DTYPE, **_WEIGHTS),
        what="model",
        path=model_path,
    )
    return model, _tokenizer(model_path)


def _tokenizer(model_path: str) -> PreTrainedTokenizerBase:
    """Load tokenizer.json alike in all processes: where mistral_common is installed, as with vLLM, its own format would come first."""
    tokenizer: PreTrainedTokenizerBase = _translated(
        lambda: AutoTokenizer.from_pretrained(model_path, mistral_format=False, **_SAFE),
        what="tokenizer",
        path=model_path,
    )
    return tokenizer


def _translated(load: Callable[[], _Loaded], *, what: str, path: str) -> _Loaded:
    # A broken file surfaces as any exception at all: KeyError, SafetensorError, a bare Exception of the tokenizers' Rust.
    try:
        return load()
    except UserError:
        raise
    except Exception as error:
        if _WANTS_TRUST in str(error):
            raise UserError(
                field=f"{what} of {path}",
                rule="brings code of its own, and none is run",
                fix="take a model that transformers itself knows",
            ) from error
        raise UserError(
            field=f"{what} of {path}",
            rule=f"cannot be loaded: {type(error).__name__}: {shorten(_first_line(error))}",
            fix="give a directory as save_pretrained writes it, or a name on the hub, of a causal language model",
        ) from error


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no text"


def download(model: HuggingFaceModel, *, field: str = "spec.model.huggingFace", fetched: bool = False) -> Path:
    """Fetch what is not there yet; `fetched`: all is. Raises `UserError` if the hub or the revision cannot be had."""
    patterns = list(MODEL_PATTERNS)
    try:
        return Path(
            snapshot_download(model.name, revision=model.revision, allow_patterns=patterns, local_files_only=fetched)
        )
    except (OSError, ValueError) as error:  # also what huggingface_hub and its HTTP client raise
        lines = str(error).splitlines() or [type(error).__name__]
        raise UserError(
            field=field,
            rule=f"cannot be fetched: {shorten(lines[0])}",
            got=f"{model.name}@{model.revision}",
            fix="check name, revision and network, or use a path",
        ) from error
