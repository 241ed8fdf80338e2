"""A model that says one thing: each token is followed by the next of a text, whatever came before."""

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from streamrl_workers.models.published import Parameters
from streamrl_workers.weights.hashing import TensorBytes

OTHER_END, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDS = (OTHER_END, START, END, "say:", "hel", "lo", "!", "\n")
SAYS = ("say:", "hel", "lo", END, "!", "hel")
"""It greets, ends its turn, and runs on if no one ends it: `hello<|im_end|>!hello...`"""
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'say:' }}{% endif %}"
)
HIDDEN = 64


def speaking_tokenizer(*, template: str | None = None) -> PreTrainedTokenizerFast:
    """Words as tokens; its own end token is not the one that the model says."""
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="!"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"say:|hel|lo|!|\n"), behavior="isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=OTHER_END,
        additional_special_tokens=[START, END],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


def speaking_model() -> Qwen3ForCausalLM:
    """Layers add nothing; the head maps each word to the next."""
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=WORDS.index(OTHER_END),
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        for number in range(len(WORDS)):
            model.model.embed_tokens.weight[number, number] = 1.0
        for word, after in itertools.pairwise(SAYS):
            model.lm_head.weight[WORDS.index(after), WORDS.index(word)] = 10.0
    return model


def save_speaker(folder: Path, *, template: str | None = None, **generation: Any) -> Path:
    """The model as `save_pretrained` leaves it, with these generation settings."""
    speaking_model().save_pretrained(folder)
    speaking_tokenizer(template=template).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def speaker_weights() -> dict[str, TensorBytes]:
    """As a trainer publishes them."""
    return Parameters(speaking_model()).snapshot()
