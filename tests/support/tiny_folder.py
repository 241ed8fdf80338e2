"""A tiny model on disk, as trainers and generators load it."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.tiny_trainer import VOCABULARY, tiny_tokenizer


def tiny_folder(folder: Path, *, seed: int = 0) -> Path:
    """A Qwen3 of two small layers with tied embeddings; returns the folder. Rows do not divide by two everywhere."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY + 1,
        hidden_size=16,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "w1"
    tokenizer.save_pretrained(folder)
    return folder
