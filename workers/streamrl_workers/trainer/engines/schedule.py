"""The learning rate of each step. Pure.

Rise: step s < W takes (s + 1) / W of the peak (W = warm-up steps). Behind it, with x = (s - W) / (N - W) the share of
the fall that has passed (N = steps of the run): Constant 1, Linear 1 - x, Cosine (1 + cos(pi x)) / 2.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate by step."""

    kind: Literal["Constant", "Linear", "Cosine"]
    peak: float
    warm_up_steps: int
    steps: int  # of the whole run

    def at(self, step: int) -> float:
        """Learning rate of the optimiser step that makes version `step + 1`."""
        if step < self.warm_up_steps:
            return self.peak * (step + 1) / self.warm_up_steps
        return self.peak * self._share((step - self.warm_up_steps) / max(1, self.steps - self.warm_up_steps))

    def _share(self, passed: float) -> float:
        if self.kind == "Linear":
            return max(0.0, 1.0 - passed)
        if self.kind == "Cosine":
            return (1.0 + math.cos(math.pi * min(1.0, passed))) / 2.0
        return 1.0
