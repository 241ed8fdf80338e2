"""The test kit refuses each mistake that it says it finds; the shipped algorithms show that it lets right ones pass."""

import math
from typing import Any, ClassVar

import pytest
import torch

from streamrl.errors import UserErrors
from streamrl.plugins import GroupAlgorithm, PluginOptions, TokenLoss
from streamrl.testing import check_advantages, check_loss, make_algorithm


class Right(GroupAlgorithm):
    """REINFORCE with the job's correction."""

    protocol: ClassVar[int] = 1
    aggregation = "TokenMean"

    class Options(PluginOptions):
        scale: float = 1.0

    def advantages(self, samples: Any) -> Any:
        return [sample.reward for sample in samples]

    def token_loss(self, batch: Any) -> Any:
        return TokenLoss.unclipped(-self.corrected(batch).weight_N * batch.advantages_N * batch.logprobs_N)


class Unmasked(Right):
    def token_loss(self, batch: Any) -> Any:
        return TokenLoss.unclipped(-batch.advantages_N * batch.logprobs_N)


class Detached(Right):
    def token_loss(self, batch: Any) -> Any:
        loss_N = -self.corrected(batch).weight_N * batch.advantages_N
        return TokenLoss.unclipped(loss_N * batch.logprobs_N.detach() + 0.0 * batch.logprobs_N)


class Averaged(Right):
    def token_loss(self, batch: Any) -> Any:
        loss_N = super().token_loss(batch).loss_N
        return TokenLoss.unclipped(loss_N / max(1, len(loss_N)) * 20)


class Largest(Right):
    def token_loss(self, batch: Any) -> Any:
        return TokenLoss.unclipped(super().token_loss(batch).loss_N + 0.0 * batch.logprobs_N.max())


class Weighing(Right):
    """Weights of e^A: a group of equal rewards has a gradient."""

    def token_loss(self, batch: Any) -> Any:
        weight_N = self.corrected(batch).weight_N * torch.exp(batch.advantages_N)
        return TokenLoss.unclipped(-weight_N * batch.logprobs_N)


class Trained(Weighing):
    skips_equal = False


def right(tokens: Any) -> list[torch.Tensor]:
    return [-token.weight * token.advantage * token.logprob for token in tokens]


def unmasked(tokens: Any) -> list[torch.Tensor]:
    return [-token.advantage * token.logprob for token in tokens]


def weighing(tokens: Any) -> list[torch.Tensor]:
    return [-token.weight * math.exp(token.advantage) * token.logprob for token in tokens]


@pytest.mark.parametrize(
    ("kind", "loop", "message"),
    [
        (Weighing, weighing, "groups of them are skipped: say `skips_equal = False`"),
        (Unmasked, right, r"losses \(seed 0\) differ, most at token"),
        (Unmasked, unmasked, "a token that the mask leaves out has a gradient"),
        (Detached, right, r"gradients \(seed 0\) differ, most at token"),
        (Averaged, right, "losses of a sequence alone and among others differ"),
        (Largest, right, r"max\(\)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_mistake_is_found(kind: Any, loop: Any, message: str) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_loss(kind, loop)


def test_a_right_one_passes_and_options_are_checked_as_a_jobs_are() -> None:
    check_loss(Right, right)
    check_loss(Trained, weighing)
    check_advantages(Right, lambda rewards: rewards)
    with pytest.raises(AssertionError, match=r"^advantages of \[0\.0, 1\.0, 1\.0, 0\.5\] are .*, the loop has"):
        check_advantages(Right, lambda rewards: [2 * reward for reward in rewards])
    with pytest.raises(UserErrors, match=r"^spec\.algorithm\.python\.options\.scale: must be a number"):
        make_algorithm(Right, options={"scale": "1"})
