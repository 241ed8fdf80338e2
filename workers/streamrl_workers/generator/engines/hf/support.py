"""Which models the engine can run.

Owns: the refusal, by name. The engine computes attention over one standard key-value cache entry per
token with a mask of its own; a model qualifies if transformers says that its layers cache so and that they
take the attention function and the mask that they are given. Whether they really do is then tried once with
the first weights: `check_numerics`.
"""

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from streamrl_workers.generator.engines.hf.runner import Runner

_RELATIVE_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference of two ways to the same logits, in units of the logits' spread. Wrong masks give about 1."""

_PROBE_TOKENS = 7


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError naming the architecture if its layers do not cache one key and value per token."""
    config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    name = f"model {type(model).__name__} (model_type {config.model_type!r})"
    kinds = sorted({type(layer).__name__ for layer in DynamicCache(config=config).layers} - {DynamicLayer.__name__})
    if kinds:
        raise ValueError(f"{name} is not supported by engine hf: its cache has {', '.join(kinds)}; {_REMEDY}")
    if getattr(model, "_is_stateful", False) or not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} is not supported by engine hf: its attention cannot be replaced; {_REMEDY}")


_REMEDY = "only causal LMs with full attention and the standard key-value cache are (Llama, Qwen2, Qwen3, GPT-2, ...)"


@torch.inference_mode()
def check_numerics(runner: Runner) -> None:
    """Raise ValueError if prefill and decode do not give the logits of the model's own forward. Rows must be free."""
    vocabulary = runner.model.get_input_embeddings().get_parameter("weight").shape[0]
    tokens = [(7 * place + 1) % vocabulary for place in range(_PROBE_TOKENS)]
    own = runner.model(input_ids=torch.tensor([tokens], device=runner.device)).logits[0, -2:].float()
    if not bool(own.isfinite().all()):
        return  # broken weights, not a broken model: sampling reports them per request
    prompt, fed = tokens[:-2], tokens[-2:]
    runner.cache.write([0], runner.prefill([prompt])[0])
    for place, token in enumerate(fed):
        at = len(prompt) + place
        positions = torch.tensor([at], device=runner.device)
        ours = runner.decode(torch.tensor([token], device=runner.device), positions=positions, lengths=[at + 1])[
            0
        ].float()
        _compare(ours, own[place], runner=runner)


def _compare(ours: torch.Tensor, own: torch.Tensor, *, runner: Runner) -> None:
    difference = float((ours - own).abs().max())
    bound = _RELATIVE_TOLERANCE[runner.dtype] * max(float(own.max() - own.min()), 1e-3)
    if difference > bound:
        raise ValueError(
            f"model {type(runner.model).__name__} is not supported by engine hf: its logits differ by {difference:.2g} "
            f"(more than {bound:.2g}) from those of its own forward; {_REMEDY}"
        )
