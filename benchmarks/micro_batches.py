"""How samples are best put into a forward pass: tokens/s of forward and backward (docs/decisions/0004-micro-batches.md).

Compares right-padded batches of alike lengths, by the padding at which a batch is closed, with padding-free packing:
all samples behind each other, with a block-diagonal mask or with attention over padded segments.

    python benchmarks/micro_batches.py [THREADS]
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import AttentionMaskInterface

VOCABULARY = 48
BUDGET_TOKENS = 16_384
MASKED_BUDGET_TOKENS = 4_096  # the mask of the block-diagonal variant grows with the square
ROUNDS = 5  # the best counts

Batch = list[int]  # lengths, longest first


def small_model() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    ).eval()


def cut(lengths: Sequence[int], *, budget_tokens: int, padding_tokens: float) -> list[Batch]:
    batches: list[Batch] = []
    padding = 0
    for length in sorted(lengths, reverse=True):
        longest = batches[-1][0] if batches else 0
        padding += longest - length
        if batches and longest * (len(batches[-1]) + 1) <= budget_tokens and padding <= padding_tokens:
            batches[-1].append(length)
        else:
            batches.append([length])
            padding = 0
    return batches


def backward(logits: torch.Tensor) -> None:
    (logits.logsumexp(-1) - logits[:, 0]).sum().backward()


def padded(model: Qwen2ForCausalLM, batches: Sequence[Batch]) -> None:
    for batch in batches:
        width = batch[0]
        logits = model(input_ids=torch.zeros(len(batch), width, dtype=torch.long), use_cache=False).logits
        rows = torch.cat([torch.arange(length - 1) + row * width for row, length in enumerate(batch)])
        backward(logits.view(-1, VOCABULARY).index_select(0, rows))


def packed(model: Qwen2ForCausalLM, batches: Sequence[Batch]) -> None:
    for batch in batches:
        positions = torch.cat([torch.arange(length) for length in batch]).unsqueeze(0)
        tokens = torch.zeros_like(positions)
        Segments.set(batch)
        backward(model(input_ids=tokens, position_ids=positions, use_cache=False).logits[0])


class Segments:
    """Where the samples of the packed row lie, as padded batches for attention alone."""

    parts: ClassVar[list[tuple[torch.Tensor, int, int]]] = []  # (place of each padded token in the row, samples, width)
    back: torch.Tensor

    @classmethod
    def set(cls, batch: Batch) -> None:
        cls.parts, cls.back = [], torch.empty(sum(batch), dtype=torch.long)
        place = padded_place = 0
        for segment in cut(batch, budget_tokens=10**9, padding_tokens=256):
            width = segment[0]
            index = torch.zeros(len(segment), width, dtype=torch.long)
            for row, length in enumerate(segment):
                index[row, :length] = torch.arange(length) + place
                cls.back[place : place + length] = torch.arange(length) + padded_place + row * width
                place += length
            cls.parts.append((index.view(-1), len(segment), width))
            padded_place += len(segment) * width

    @classmethod
    def attention(cls, _module, query, key, value, _mask, scaling=None, **_kwargs):  # noqa: ANN001, ANN003, ANN206
        heads, size = query.shape[1], query.shape[3]
        results = []
        for index, samples, width in cls.parts:
            q, k, v = (
                x[0].transpose(0, 1).index_select(0, index).view(samples, width, heads, size).transpose(1, 2)
                for x in (query, key, value)
            )
            result = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
            results.append(result.transpose(1, 2).reshape(samples * width, heads, size))
        return torch.cat(results).index_select(0, cls.back).unsqueeze(0), None


def best_seconds(run: Callable[[], None]) -> float:
    run()
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    AttentionInterface.register("segments", Segments.attention)
    AttentionMaskInterface.register("segments", lambda *_args, **_kwargs: None)
    rng, model = random.Random(0), small_model()
    lengths_by_name = {
        "512 samples of about 30 tokens": [max(8, min(60, int(rng.gauss(30, 8)))) for _ in range(512)],
        "64 samples, skewed, up to 512 tokens": [
            max(32, min(512, int(rng.lognormvariate(4.6, 0.8)))) for _ in range(64)
        ],
    }
    for name, lengths in lengths_by_name.items():
        tokens = sum(lengths)
        print(f"{name} ({tokens} tokens), tokens/s:")
        model.set_attn_implementation("sdpa")
        for limit in (64, 128, 256, 512, 1024, float("inf")):
            batches = cut(lengths, budget_tokens=BUDGET_TOKENS, padding_tokens=limit)
            speed = tokens / best_seconds(partial(padded, model, batches))
            print(f"  padded, closed at {limit} padding tokens ({len(batches)} passes): {speed:.0f}")
        batches = cut(lengths, budget_tokens=MASKED_BUDGET_TOKENS, padding_tokens=float("inf"))
        print(f"  packed, block-diagonal mask: {tokens / best_seconds(partial(packed, model, batches)):.0f}")
        model.set_attn_implementation("segments")
        batches = cut(lengths, budget_tokens=BUDGET_TOKENS, padding_tokens=float("inf"))
        print(f"  packed, attention over segments: {tokens / best_seconds(partial(packed, model, batches)):.0f}")


if __name__ == "__main__":
    main()
