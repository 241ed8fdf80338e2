"""Small models with random weights, saved with a tokenizer of characters."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from streamrl_workers.weights.hashing import TensorBytes

CHARS = "0123456789+-= abcdefgh\n"
END = len(CHARS)
POSITIONS = 256
_SIZES = {
    "vocab_size": len(CHARS) + 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,  # of 32 values: vLLM's attention on CPUs takes no fewer
    "num_key_value_heads": 1,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.08,  # logits are spread: a wrong one shows
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make(kind: str, *, seed: int) -> PreTrainedModel:
    """`kind`: qwen2 (tied), qwen3, llama."""
    torch.manual_seed(seed)
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True)).eval()
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=False)).eval()
    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False)).eval()


def save(kind: str, folder: Path) -> Path:
    """Configuration and tokenizer, without weights: what a generator has."""
    tokenizer().save_pretrained(folder)
    model = make(kind, seed=0)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character, and one for the end."""
    vocab = {char: index for index, char in enumerate(CHARS)} | {"<end>": END}
    core = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def published(model: PreTrainedModel) -> dict[str, TensorBytes]:
    """As a trainer publishes: of tied tensors one name."""
    named = dict(model.named_parameters())  # without doubles
    return {
        name: TensorBytes("float32", tuple(tensor.shape), memoryview(tensor.detach().numpy().tobytes()))
        for name, tensor in named.items()
    }


@torch.inference_mode()
def logprobs(model: PreTrainedModel, prompt: tuple[int, ...], completion: list[int]) -> list[float]:
    """Of the completion's tokens at temperature 1, by a plain forward."""
    tokens = torch.tensor([[*prompt, *completion]])
    scores = model(input_ids=tokens).logits[0].float().log_softmax(-1)
    at = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
    return [float(scores[place, token]) for place, token in zip(at, completion, strict=True)]
