"""The batch: which sequence is in which row, each row's numbers as tensors, and how each row's next token is drawn.

Owns temperature, top-k, top-p, log-probs, the counter-based random numbers. Does not own keys and values, logits, stop conditions.

Invariants:
- A row's keys and values are those of all its tokens but the last; the last is fed by the next step. So a first token
  after a prompt, a continuation behind a prefix and any other step are one and the same.
- The number that decides a token is a pure function of (seed, position): a completion does not depend on its batch mates,
  and one that continues from a prefix goes on with the same numbers.

Legend of name suffixes (shapes): b rows, v vocabulary.
"""

from dataclasses import dataclass

import torch

from streamrl_workers.generator.engines.requests import ActiveSequence

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
    tokens_b = _inverse_cdf(_filtered(logits_bv.softmax(-1), draw), draw.uniforms_b)
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
    filtered_bv = torch.zeros_like(kept_bv).scatter_(-1, order_bv, kept_bv)
    # Rows that ask for neither stay as they are without such neighbours, to the last digit.
    whole_b = (draw.top_p_b >= 1) & (draw.top_k_b >= probs_bv.shape[-1])
    return torch.where(whole_b.unsqueeze(-1), probs_bv.double(), filtered_bv)


class BatchState:
    """Active sequences in row order, with their numbers."""

    def __init__(self, *, slots: int, vocabulary: int, device: torch.device) -> None:
        self.sequences: list[ActiveSequence] = []
        self._vocabulary = vocabulary
        self._device = device
        # Rows of _whole: last token, its position, stream key, top-k. Of _real: temperature, top-p.
        self._whole = torch.zeros((4, slots), dtype=torch.int64, device=device)
        self._real = torch.ones((2, slots), dtype=torch.float64, device=device)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def tokens(self) -> torch.Tensor:
        """Token to feed, per row."""
        return self._whole[0, : len(self)]

    @property
    def positions(self) -> torch.Tensor:
        """Where that token stands, per row."""
        return self._whole[1, : len(self)]

    def lengths(self) -> list[int]:
        """Tokens per row, the one to feed included."""
        return [len(seq.prompt) + len(seq.completion) for seq in self.sequences]

    def fed_lengths(self) -> list[int]:
        """Of these, those up to the one to feed."""
        return [length - seq.replayed for length, seq in zip(self.lengths(), self.sequences, strict=True)]

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        pair = [row, other]
        self._whole[:, pair] = self._whole[:, pair[::-1]]
        self._real[:, pair] = self._real[:, pair[::-1]]
        self.sequences[row], self.sequences[other] = self.sequences[other], self.sequences[row]

    def append(self, sequences: list[ActiveSequence]) -> None:
        """Put sequences into the next rows."""
        first, end = len(self), len(self) + len(sequences)
        whole = [self._whole_of(seq) for seq in sequences]
        real = [(seq.request.sampling.temperature, seq.request.sampling.top_p) for seq in sequences]
        self._whole[:, first:end] = torch.tensor(whole, device=self._device).T
        self._real[:, first:end] = torch.tensor(real, dtype=torch.float64, device=self._device).T
        self.sequences.extend(sequences)

    def move(self, *, sources: list[int], targets: list[int]) -> None:
        """Put rows in the place of others, pairwise; no row is both source and target."""
        self._whole[:, targets] = self._whole[:, sources]
        self._real[:, targets] = self._real[:, sources]
        for source, target in zip(sources, targets, strict=True):
            self.sequences[target] = self.sequences[source]

    def cut(self, count: int) -> None:
        """Drop the last `count` rows."""
        del self.sequences[len(self) - count :]

    def advance(self, tokens: torch.Tensor) -> list[int]:
        """Take the tokens that were drawn as the next to feed; returns the rows that did: others feed what they have again."""
        self._whole[0, : len(self)] = tokens
        self._whole[1, : len(self)] += 1
        drawn = [row for row, seq in enumerate(self.sequences) if not seq.replayed]
        for row in set(range(len(self))).difference(drawn):
            seq = self.sequences[row]
            seq.replayed -= 1
            self._whole[0, row] = seq.completion[-1 - seq.replayed]
        return drawn

    def restart(self) -> None:
        """Take the rows' numbers from their sequences anew."""
        sequences, self.sequences = self.sequences, []
        if sequences:
            self.append(sequences)

    def draw(self) -> Draw:
        """What decides the next tokens. What no row uses is left out, which saves its passes over the vocabulary."""
        active = len(self)
        samplings = [seq.request.sampling for seq in self.sequences]
        tempered = any(sampling.temperature != 1.0 for sampling in samplings)
        filtered = any(sampling.top_p < 1.0 or sampling.top_k for sampling in samplings)
        return Draw(
            uniforms_b=uniforms(self._whole[2, :active], positions_b=self.positions),
            temperature_b=self._real[0, :active].float() if tempered else None,
            top_p_b=self._real[1, :active] if filtered else None,
            top_k_b=self._whole[3, :active] if filtered else None,
        )

    def _whole_of(self, seq: ActiveSequence) -> tuple[int, int, int, int]:
        tokens = seq.tokens
        position = len(tokens) - 1 - seq.replayed
        top_k = seq.request.sampling.top_k or self._vocabulary
        return tokens[position], position, stream_key(seq.request.seed), top_k
