"""Corrections by name, as in `algorithm.correction` of an RLJob: what is made of the policy that drew the samples. Pure.

Three policies meet in a token: pi in training, the proximal one (the weights when the step's updates began), and mu, the behaviour
that drew it (older weights, or the same ones in the generator's arithmetic). A correction says of which of them the clipped
ratio is (the anchor), by what weight w a token's loss is multiplied, and the ratio's cap.

Importance weights, of token t of sequence y:

    Token      w_t = r_t,  r_t = proximal(t) / mu(t)        variance is small; what earlier tokens differ by is left out
    Sequence   w_t = prod over all tokens u of y of r_u     the whole ratio, the same at each token; far from 1 for long sequences

The mean of the losses is over all tokens, those of weight 0 too.

A correction may also have a mask: which tokens take part follows from the log-ratios of the whole step. The engine then forms the
proximal log-probs of all samples before it trains the first; the tokens that are left out get weight 0.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from streamrl.spec.algorithm import (
    Correction,
    DecoupledPpo,
    ImportanceLevel,
    M2po,
    MaskedImportance,
    TruncatedImportance,
    TwoSidedClip,
)
from streamrl.spec.base import PluginOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """What the surrogate is formed from; [N]."""

    anchor_N: torch.Tensor  # log-probs that the ratio divides by
    weight_N: torch.Tensor  # factor of the token's loss; no gradient
    cap: float = math.inf  # bound of the ratio where the advantage is negative


class Corrector(Protocol):
    """A correction with the job's constants."""

    def __call__(self, *, proximal_N: torch.Tensor, behaviour_N: torch.Tensor, sequences_N: torch.Tensor) -> Corrected:
        """Log-probs without gradient, and which sequence each token is of."""


BatchMask = Callable[[torch.Tensor], torch.Tensor]
"""log proximal - log mu of all tokens of a step [N] -> bool [N]: True where the token takes part."""


class SampleCorrection(ABC):
    """Base of plug-ins that correct for samples of another policy."""

    mask: BatchMask | None = None
    """A method `mask(log_ratio_N)`, where the tokens that take part follow from the whole step."""

    def __init__(self, options: PluginOptions) -> None:
        self.options: Any = options

    @abstractmethod
    def __call__(self, *, proximal_N: torch.Tensor, behaviour_N: torch.Tensor, sequences_N: torch.Tensor) -> Corrected:
        """Log-probs without gradient, and which sequence each token is of."""


def two_sided_clip(spec: TwoSidedClip) -> Corrector:
    """Ratio pi / mu, at most `cap` where A < 0 (dual clip, arXiv 1912.09729, eq. 5, as INTELLECT-2, arXiv 2505.07291, states it on the ratio)."""

    def correct(*, proximal_N: torch.Tensor, behaviour_N: torch.Tensor, sequences_N: torch.Tensor) -> Corrected:
        del sequences_N
        return Corrected(anchor_N=behaviour_N, weight_N=proximal_N.new_ones(proximal_N.shape), cap=spec.cap)

    return correct


def truncated_importance(spec: TruncatedImportance) -> Corrector:
    """Weight min(w, cap); ratio pi / proximal.

    Of tokens: IMPALA (arXiv 1802.01561, section 4.1), and TIS (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy
    RL Training"). Of sequences: Liu et al. 2025, "When Speed Kills Stability".
    """

    def correct(*, proximal_N: torch.Tensor, behaviour_N: torch.Tensor, sequences_N: torch.Tensor) -> Corrected:
        weight_N = importance(proximal_N - behaviour_N, sequences_N=sequences_N, level=spec.level)
        return Corrected(anchor_N=proximal_N, weight_N=weight_N.clamp(max=spec.cap))

    return correct


def masked_importance(spec: MaskedImportance) -> Corrector:
    """Weight w where low <= w <= high, else 0; ratio pi / proximal.

    Of tokens: IcePop (arXiv 2510.18855). Of sequences: MIS (Liu et al. 2025, as above).
    """

    def correct(*, proximal_N: torch.Tensor, behaviour_N: torch.Tensor, sequences_N: torch.Tensor) -> Corrected:
        weight_N = importance(proximal_N - behaviour_N, sequences_N=sequences_N, level=spec.level)
        outside_N = (weight_N < spec.low) | (weight_N > spec.high)
        return Corrected(anchor_N=proximal_N, weight_N=weight_N.masked_fill(outside_N, 0.0))

    return correct


def decoupled_ppo(spec: DecoupledPpo) -> Corrector:
    """Weight proximal / mu (AReaL, arXiv 2505.24298, eq. 5), 0 above `cap`; ratio pi / proximal."""
    return masked_importance(MaskedImportance(low=0.0, high=spec.cap))


def m2po(spec: M2po) -> Corrector:
    """Weight proximal / mu; ratio pi / proximal. The step's tokens are masked by `second_moment_mask` (M2PO, arXiv 2510.01161)."""
    del spec

    def correct(*, proximal_N: torch.Tensor, behaviour_N: torch.Tensor, sequences_N: torch.Tensor) -> Corrected:
        weight_N = importance(proximal_N - behaviour_N, sequences_N=sequences_N, level="Token")
        return Corrected(anchor_N=proximal_N, weight_N=weight_N)

    return correct


def second_moment_mask(spec: M2po) -> BatchMask:
    """Leaves out as few tokens as possible, largest |d| first, until the mean of d^2 of the rest is at most `threshold` (algorithm 1).

    Equal |d| stay or go together, so the order of the tokens does not matter. One that is no number is infinitely large.
    """

    def kept(log_ratio_N: torch.Tensor) -> torch.Tensor:
        squares_N = log_ratio_N.double().square()
        squares_N = squares_N.masked_fill(squares_N.isnan(), math.inf)
        rising_N, _ = squares_N.sort()
        means_N = rising_N.cumsum(0) / torch.arange(1, len(rising_N) + 1, dtype=torch.float64)  # they rise too
        count = int((means_N <= spec.threshold).sum())
        return squares_N < rising_N[count] if count < len(rising_N) else torch.ones_like(squares_N, dtype=torch.bool)

    return kept


CORRECTIONS: dict[str, Callable[[Any], Corrector]] = {
    "twoSidedClip": two_sided_clip,
    "truncatedImportance": truncated_importance,
    "maskedImportance": masked_importance,
    "decoupledPpo": decoupled_ppo,
    "m2po": m2po,
}
"""By name, as in `algorithm.correction` of an RLJob."""
MASKS: dict[str, Callable[[Any], BatchMask]] = {"m2po": second_moment_mask}
"""Of those that have one."""


def create_correction(spec: Correction) -> Corrector:
    """The correction that the job chose."""
    return CORRECTIONS[spec.key](spec.value)


def create_mask(spec: Correction) -> BatchMask | None:
    """The mask of the correction that the job chose, if it has one."""
    return MASKS[spec.key](spec.value) if spec.key in MASKS else None


def importance(log_ratio_N: torch.Tensor, *, sequences_N: torch.Tensor, level: ImportanceLevel) -> torch.Tensor:
    """w of each token."""
    if level == "Sequence":
        log_ratio_N = sequence_sums(log_ratio_N, sequences_N=sequences_N)
    return log_ratio_N.exp()


def sequence_sums(values_N: torch.Tensor, *, sequences_N: torch.Tensor) -> torch.Tensor:
    """Each token's value replaced by the sum over its sequence."""
    count = int(sequences_N.max()) + 1 if len(sequences_N) else 0
    return values_N.new_zeros(count).index_add(0, sequences_N, values_N)[sequences_N]
