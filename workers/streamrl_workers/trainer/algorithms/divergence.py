"""Estimates of the divergence KL(policy || reference) from drawn tokens (Schulman, "Approximating KL Divergence", 2020).

Of d = log policy(t) - log reference(t) of a token that the policy drew:

    K1 = d                   unbiased; as a loss its gradient is zero in expectation, so it belongs into rewards
    K2 = d^2 / 2             biased; as a loss its gradient is that of the divergence
    K3 = exp(-d) - 1 + d     unbiased, never negative
"""

from collections.abc import Callable
from typing import Literal

import torch

Estimator = Literal["K1", "K2", "K3"]

ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "K1": lambda d: d,
    "K2": lambda d: d.square() / 2.0,
    "K3": lambda d: torch.expm1(-d) + d,
}


def divergence(log_ratio_N: torch.Tensor, *, estimator: Estimator) -> torch.Tensor:
    """The estimate for each token; carries the gradient of `log_ratio_N`."""
    return ESTIMATORS[estimator](log_ratio_N)
