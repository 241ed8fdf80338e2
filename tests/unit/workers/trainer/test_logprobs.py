"""Log-probs by chunks against whole logits: values, entropies and gradients, for several architectures and heads."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from streamrl import memory
from streamrl.errors import UserError
from streamrl.spec.training import Lora
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.models.lora import add_adapters
from streamrl_workers.trainer.engines.forward import Forward, MicroBatch, make_batch
from streamrl_workers.trainer.engines.packing import DUMMY, pack_sample
from support.trainer_groups import make_group

CPU = torch.device("cpu")
VOCABULARY = 37
CHUNK_TOKENS = 5
TEMPERATURE = 0.7
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
ARCHITECTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen2, tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "logits are capped": lambda: Gemma2Config(**SIZES, final_logit_softcapping=2.0),
    "logits are scaled": lambda: GraniteConfig(**SIZES, logits_scaling=3.0),
    "experts": lambda: MixtralConfig(**SIZES, num_local_experts=2),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    ),
    "decoder within the body": lambda: OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16),
}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(memory, "CHUNK_LOGITS", CHUNK_TOKENS * VOCABULARY + 1)


def _model(architecture: str, *, adapters: bool = False) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]()).eval()
    if adapters:
        add_adapters(model, Lora.model_validate({"rank": 2, "targetModules": ("lm_head", "q_proj")}))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return model


def _batch() -> MicroBatch:
    samples = [one for t in make_group(1).samples for one in pack_sample(t, step=0, attempt=1, advantage=1.0)]
    batch = make_batch(samples, aggregation="TokenMean", device=CPU)
    assert len(batch.targets_N) > 3 * CHUNK_TOKENS
    return batch


def _plain(model: PreTrainedModel, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole logits, torch's own log-softmax."""
    logits = model(input_ids=batch.inputs_BL, use_cache=False).logits
    rows = torch.log_softmax(logits.flatten(0, 1)[batch.rows_N].float() / TEMPERATURE, -1)
    return rows.gather(1, batch.targets_N[:, None]).squeeze(1), -(rows.exp() * rows).sum(-1).detach()


def _gradients(model: PreTrainedModel, logprobs_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss in which every token has a weight of its own, some of them none."""
    weights_N = torch.randn(len(logprobs_N), generator=torch.Generator().manual_seed(3)).clamp(min=-0.5)
    (logprobs_N * weights_N).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _compare(model: PreTrainedModel, again: PreTrainedModel, *, tolerance: float = 1e-5) -> None:
    batch = _batch()
    expected_N, entropies_N = _plain(model, batch)
    expected = _gradients(model, expected_N)
    found_N, found_entropies_N = Forward(again, temperature=TEMPERATURE).logprobs_entropy(batch)
    near: dict[str, Any] = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(found_N, expected_N, **near)
    torch.testing.assert_close(found_entropies_N, entropies_N, **near)
    assert not found_entropies_N.requires_grad
    found = _gradients(again, found_N)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, **near, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_and_gradients_are_those_of_whole_logits(architecture: str) -> None:
    again = _model(architecture)
    answer_logprobs(again)
    _compare(_model(architecture), again)


def test_adapters_at_the_head_get_their_gradients() -> None:
    again = _model("llama", adapters=True)
    answer_logprobs(again)
    _compare(_model("llama", adapters=True), again)
    assert {name for name, p in again.named_parameters() if p.grad is not None and "lm_head" in name} == {
        "lm_head.lora_A.default.weight",
        "lm_head.lora_B.default.weight",
    }


def test_no_chunk_holds_more_logits_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = _model("llama"), []
    monkeypatch.setattr(
        model.lm_head, "forward", lambda states, f=model.lm_head.forward: seen.append(len(states[0])) or f(states)
    )
    answer_logprobs(model)
    batch = _batch()
    Forward(model, temperature=1.0).logprobs(batch).sum().backward()
    tokens = len(batch.targets_N)
    assert max(seen) == CHUNK_TOKENS
    assert sum(seen) == 2 * tokens  # forward and backward; prompts and padding have no logits


def test_a_pass_without_a_token_gives_gradients_of_zero() -> None:
    model = _model("llama")
    answer_logprobs(model)
    batch = make_batch([DUMMY], aggregation="TokenMean", device=CPU)
    Forward(model, temperature=1.0).logprobs(batch).sum().backward()
    assert not any(p.grad is None or p.grad.any() for p in model.parameters())


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UserError, match="must be of a decoder with a head of its own, got 'LlamaModel'"):
        answer_logprobs(_model("llama").base_model)
