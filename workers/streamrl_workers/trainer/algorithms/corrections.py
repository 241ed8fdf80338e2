"""How samples of another policy are corrected for, by name as in `algorithm.correction` of an RLJob.

Three policies meet in a token: pi in training, the proximal one (the weights when the step's updates began), and mu, the
behaviour that drew it (older weights, or the same ones in the generator's arithmetic). A correction says of which of
them the clipped ratio is, by what a token's loss is weighed, and whether the ratio is bounded where the clip does not bound it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from streamrl.spec.training import Correction, DecoupledPpo, TruncatedImportance, TwoSidedClip

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrected:
    """What the surrogate is formed from; [N]."""

    anchor_N: "torch.Tensor"  # log-probs that the ratio divides by
    weight_N: "torch.Tensor"  # factor of the token's loss; no gradient
    cap: float = math.inf  # bound of the ratio where the advantage is negative


class Corrector(Protocol):
    """A correction with the job's constants."""

    def __call__(self, *, proximal_N: "torch.Tensor", behaviour_N: "torch.Tensor") -> Corrected:
        """Both are log-probs without gradient."""


def two_sided_clip(spec: TwoSidedClip) -> Corrector:
    """Ratio pi / mu, at most `cap` where A < 0 (dual clip, arXiv 1912.09729, eq. 5, as INTELLECT-2, arXiv 2505.07291, states it on the ratio)."""

    def correct(*, proximal_N: "torch.Tensor", behaviour_N: "torch.Tensor") -> Corrected:
        return Corrected(anchor_N=behaviour_N, weight_N=proximal_N.new_ones(proximal_N.shape), cap=spec.cap)

    return correct


def truncated_importance(spec: TruncatedImportance) -> Corrector:
    """Weight min(proximal / mu, cap) (as in IMPALA, arXiv 1802.01561); ratio pi / proximal."""

    def correct(*, proximal_N: "torch.Tensor", behaviour_N: "torch.Tensor") -> Corrected:
        return Corrected(anchor_N=proximal_N, weight_N=(proximal_N - behaviour_N).exp().clamp(max=spec.cap))

    return correct


def decoupled_ppo(spec: DecoupledPpo) -> Corrector:
    """Weight proximal / mu (AReaL, arXiv 2505.24298, eq. 5), 0 above `cap`; ratio pi / proximal."""

    def correct(*, proximal_N: "torch.Tensor", behaviour_N: "torch.Tensor") -> Corrected:
        weight_N = (proximal_N - behaviour_N).exp()
        return Corrected(anchor_N=proximal_N, weight_N=weight_N.masked_fill(weight_N > spec.cap, 0.0))

    return correct


CORRECTIONS: dict[str, Callable[[Any], Corrector]] = {
    "twoSidedClip": two_sided_clip,
    "truncatedImportance": truncated_importance,
    "decoupledPpo": decoupled_ppo,
}


def create_correction(spec: Correction) -> Corrector:
    """The correction that the job chose."""
    return CORRECTIONS[spec.key](spec.value)
