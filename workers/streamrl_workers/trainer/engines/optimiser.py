"""AdamW over accumulated gradient sums: scale once, clip, step.

Owns: parameter groups, gradient buffers, the learning rate. Gradients are zeroed, never dropped: a step in which
nothing was learned still moves by its momentum, as one big batch of zero gradients would.

Above one rank each holds a part of every tensor; the norm is that of all parts, so all ranks clip and refuse alike.
"""

import torch

from streamrl.spec.training import Trainer
from streamrl_workers.trainer.engines.schedule import Schedule
from streamrl_workers.trainer.engines.sharding import global_norm, local

_BETAS = (0.9, 0.999)
"""AdamW's own defaults."""
_NORM_FLOOR = 1e-6
"""Keeps the division by a norm of zero finite, as torch's own clipping does."""


class Optimiser:
    """The optimiser of one model."""

    def __init__(self, model: torch.nn.Module, *, spec: Trainer, steps: int) -> None:
        """`model`: as it stays, sharded and with its adapters; what needs no gradient is left alone."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._clip_norm = spec.gradient_clip_norm
        self._schedule = Schedule(
            kind=spec.schedule, peak=spec.learning_rate, warm_up_steps=spec.warm_up_steps, steps=steps
        )
        groups = [
            {"params": [p for p in self._parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in self._parameters if p.ndim <= 1], "weight_decay": 0.0},  # norms and biases
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=spec.learning_rate, betas=_BETAS)

    def zero(self) -> None:
        """Forget what was accumulated."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    @torch.no_grad()
    def step(self, step: int, *, scale: float) -> dict[str, float]:
        """Multiply the sums by `scale`, clip, and update; a gradient that is not finite changes nothing but is counted."""
        rate = self._schedule.at(step)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        parts = [local(gradient) for gradient in gradients]
        torch._foreach_mul_(parts, scale)
        norm = global_norm(gradients)
        finite = bool(torch.isfinite(norm))
        if finite:
            torch._foreach_mul_(parts, torch.clamp(self._clip_norm / (norm + _NORM_FLOOR), max=1.0))
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        return {
            "gradient_norm": float(norm) if finite else 0.0,
            "learning_rate": rate,
            "refused_updates": float(not finite),
        }
