"""Draws tokens from logits, one independent stream of random numbers per request.

Owns: temperature, top-k, top-p, log-probs, and the counter-based random numbers. Does not own: logits,
stop conditions.

Invariant: the number that decides a token is a pure function of (seed, position), so a completion does
not depend on its batch mates, and one that continues from a prefix goes on with the same numbers.

Legend of name suffixes (shapes): b rows, v vocabulary.
"""

from dataclasses import dataclass

import torch

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
"""Constants of splitmix64."""

_MANTISSA_BITS = 53
"""Bits of a float64's mantissa: a uniform has as many as fit."""


def as_int64(value: int) -> int:
    """The signed number with the same low 64 bits: torch has no unsigned arithmetic."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def stream_key(seed: int) -> int:
    """Key of a seed's stream (int64). Mixed, so that neighbouring seeds do not give shifted copies of one stream."""
    z = (seed + _GOLDEN) & _MASK_64
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK_64
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK_64
    return as_int64(z ^ (z >> 31))


def uniforms(keys_b: torch.Tensor, *, positions_b: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) (float64), the `positions_b`-th of each stream: splitmix64 as a counter."""
    z = keys_b + positions_b * as_int64(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * as_int64(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * as_int64(_MIX_2)
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 64 - _MANTISSA_BITS).double() * 2.0**-_MANTISSA_BITS


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What decides the next token of each row."""

    uniforms_b: torch.Tensor  # float64 in [0, 1)
    temperature_b: torch.Tensor | None  # float32, 0 = greedy; None = all 1
    top_p_b: torch.Tensor | None  # float64; None = all off, as is top_k_b
    top_k_b: torch.Tensor | None  # int64, at least 1


def draw_tokens(logits_bv: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens (int64 [B]) and their log-probs (float32 [B]) at the temperature, before top-k and top-p."""
    logits_bv = logits_bv.float()
    greedy_b = None
    if draw.temperature_b is not None:
        greedy_b = draw.temperature_b == 0
        logits_bv = logits_bv / draw.temperature_b.masked_fill(greedy_b, 1.0).unsqueeze(-1)
    logprobs_bv = logits_bv.log_softmax(-1)
    tokens_b = _inverse_cdf(_filtered(logprobs_bv.exp(), draw), draw.uniforms_b)
    if greedy_b is not None:
        tokens_b = torch.where(greedy_b, logprobs_bv.argmax(-1), tokens_b)
    return tokens_b, logprobs_bv.gather(-1, tokens_b.unsqueeze(-1)).squeeze(-1)


def _inverse_cdf(probs_bv: torch.Tensor, uniforms_b: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulated probability exceeds the uniform's share of the total."""
    cdf_bv = probs_bv.cumsum(-1, dtype=torch.float64)
    target_b1 = uniforms_b.unsqueeze(-1) * cdf_bv[:, -1:]
    # NaN probabilities find no token; the clamp keeps the index valid and the log-prob tells.
    return torch.searchsorted(cdf_bv, target_b1, right=True).squeeze(-1).clamp_(max=cdf_bv.shape[-1] - 1)


def _filtered(probs_bv: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Zero what top-k, and then top-p of the rest, leave out."""
    if draw.top_p_b is None or draw.top_k_b is None:
        return probs_bv
    sorted_bv, order_bv = probs_bv.sort(dim=-1, descending=True, stable=True)
    rank_v = torch.arange(probs_bv.shape[-1], device=probs_bv.device)
    sorted_bv = sorted_bv.double() * (rank_v < draw.top_k_b.unsqueeze(-1))
    cumulated_bv = sorted_bv.cumsum(-1)
    before_bv = cumulated_bv - sorted_bv
    kept_bv = sorted_bv * (before_bv < draw.top_p_b.unsqueeze(-1) * cumulated_bv[:, -1:])
    return torch.zeros_like(kept_bv).scatter_(-1, order_bv, kept_bv)
