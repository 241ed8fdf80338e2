"""What the torch engine asks of a learning rule.

A rule is pure: rewards of one group in, advantages out; log-probs in, one loss per token out. It does not
batch, weigh sequences against each other, or step. Shapes: N tokens of any number of sequences, one behind the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The completion tokens of one forward pass."""

    logprobs_N: torch.Tensor  # of the policy in training, at the sampling temperature; carries the gradient
    behaviour_N: torch.Tensor  # of the generator that drew the token, at the same temperature
    advantages_N: torch.Tensor  # of the token's sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What a rule makes of them."""

    loss_N: torch.Tensor
    ratio_N: torch.Tensor  # policy / behaviour, detached
    clipped_N: torch.Tensor  # bool: the token gets no gradient because its ratio is out of bounds


class Algorithm(Protocol):
    """A learning rule that needs whole groups, never the whole batch."""

    @property
    def aggregation(self) -> Literal["SequenceMean", "TokenMean"]:
        """How token losses become the step's loss."""

    def advantages(self, rewards: Sequence[float | None]) -> list[float | None]:
        """Advantage of each sample of one group; None: the sample has no reward and is left out."""

    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """Loss of every token."""
