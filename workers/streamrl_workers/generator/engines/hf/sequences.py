"""The active sequences: one row each, kept compact.

Owns: which sequence is in which row, and per-row numbers as tensors (so that a step touches no Python per
row for them). Does not own: keys and values, stop conditions.

Invariant: a row holds keys and values of all its tokens but the last; the last is fed by the next step. So
a first token after a prompt, a continuation behind a prefix and any other step are one and the same.
"""

from dataclasses import dataclass

import torch

from streamrl_workers.generator.engine import Request
from streamrl_workers.generator.sampling import Draw, stream_key, uniforms


@dataclass(slots=True, kw_only=True, eq=False)
class ActiveSequence:
    """A request in a slot."""

    request: Request
    prompt: tuple[int, ...]
    completion: list[int]  # prefix and observation included
    limit: int  # tokens of the completion at most, context included
    context: int = 0  # of the completion's tokens, those before the turn under way
    observed: tuple[int, ...] = ()  # the end of the context, where this request brought it as text
    reported: bool = False  # its first delta is out

    @property
    def turn(self) -> list[int]:
        """The completion without its context."""
        return self.completion[self.context :]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.completion]


class Rows:
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

    def advance(self, tokens: torch.Tensor) -> None:
        """Take the tokens that were drawn as the next to feed."""
        self._whole[0, : len(self)] = tokens
        self._whole[1, : len(self)] += 1

    def draw(self) -> Draw:
        """What decides the next tokens. What no row uses is left out, which saves its passes over the vocabulary."""
        active = len(self)
        samplings = [seq.request.sampling for seq in self.sequences]
        tempered = any(sampling.temperature != 1.0 for sampling in samplings)
        filtered = any(sampling.top_p < 1.0 or sampling.top_k is not None for sampling in samplings)
        return Draw(
            uniforms_b=uniforms(self._whole[2, :active], positions_b=self.positions),
            temperature_b=self._real[0, :active].float() if tempered else None,
            top_p_b=self._real[1, :active] if filtered else None,
            top_k_b=self._whole[3, :active] if filtered else None,
        )

    def _whole_of(self, seq: ActiveSequence) -> tuple[int, int, int, int]:
        tokens = seq.tokens
        top_k = seq.request.sampling.top_k or self._vocabulary
        return tokens[-1], len(tokens) - 1, stream_key(seq.request.seed), top_k
