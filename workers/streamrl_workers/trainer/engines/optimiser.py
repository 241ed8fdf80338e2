"""The optimiser of one model on one rank: AdamW, or Muon for the matrices of the transformer blocks and AdamW for the rest.

Owns: which tensor is updated by which of torch's optimizers, the learning rate, scale and clip of the gradients, the state of each tensor.
Does not own: when an update is due (`worker.py`), the files of the state (`model_files.py`).

Muon (arXiv 2502.16982) turns the momentum of a matrix into the nearest orthogonal one. That needs the whole matrix, and ranks hold parts:
each rank gathers one matrix at a time, computes its direction, and applies the part that it holds. Steps are scaled to the size of
AdamW's, so one learning rate and one weight decay serve both.

The learning rate rises: step s < W takes (s + 1) / W of the peak (W = warm-up steps). After that, with x = (s - W) / (N - W) the
share of the fall that has passed (N = steps of the run): Constant 1, Linear 1 - x, Cosine (1 + cos(pi x)) / 2.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from streamrl.spec.training import Optimizer, Trainer
from streamrl_workers.trainer.engines.blocks import part_of
from streamrl_workers.trainer.engines.sharding import blocks_of, compute_device, full, global_norm, local
from streamrl_workers.trainer.engines.tensor_parallel import group_of, partial_gradients, sum_partial

_BETAS = (0.9, 0.999)
"""AdamW's own defaults."""
_NORM_FLOOR = 1e-6
"""Keeps the division by a norm of zero finite, as torch's own clipping does."""
_MATRIX = 2
"""Dimensions of a matrix."""
_MUON_STATE = "momentum_buffer"
"""Name of Muon's state, by torch; AdamW has no state of this name."""


def learning_rate(step: int, *, spec: Trainer, steps: int) -> float:
    """Return that of the optimiser step that makes version `step + 1`; `steps` are those of the whole run."""
    if step < spec.warm_up_steps:
        return spec.learning_rate * (step + 1) / spec.warm_up_steps
    passed = (step - spec.warm_up_steps) / max(1, steps - spec.warm_up_steps)
    if spec.schedule == "Linear":
        return spec.learning_rate * max(0.0, 1.0 - passed)
    if spec.schedule == "Cosine":
        return spec.learning_rate * ((1.0 + math.cos(math.pi * min(1.0, passed))) / 2.0)
    return spec.learning_rate


def written_by(names: Iterable[str]) -> Optimizer:
    """Return the optimizer of a checkpoint whose tensors have these names."""
    return "Muon" if any(name.endswith(f".{_MUON_STATE}") for name in names) else "AdamW"


class Optimiser:
    """The optimiser of one model."""

    def __init__(self, model: torch.nn.Module, *, spec: Trainer, steps: int) -> None:
        """`model`: as it stays, sharded and with its adapters; what needs no gradient is left alone."""
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._spec, self._steps = spec, steps
        self._tensor_group = group_of(model)
        self._partial = [] if self._tensor_group is None else partial_gradients(model)
        matrices = muon_parameters(model) if spec.optimizer == "Muon" else []
        taken = {id(p) for p in matrices}
        rest = [p for p in self._parameters if id(p) not in taken]
        groups = [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},  # norms and biases
        ]
        filled = [group for group in groups if group["params"]]
        self._parts: list[torch.optim.Optimizer] = []
        if filled:
            self._parts.append(torch.optim.AdamW(filled, lr=spec.learning_rate, betas=_BETAS, fused=True))
        if matrices:
            self._parts.append(_ShardedMuon(matrices, weight_decay=spec.weight_decay, device=compute_device(model)))
        self._part_of = {p: part for part in self._parts for group in part.param_groups for p in group["params"]}

    @property
    def name(self) -> Optimizer:
        """As the job has it."""
        return self._spec.optimizer

    @property
    def owed_bytes(self) -> int:
        """Bytes of the moments that the first update will allocate."""
        if any(part.state for part in self._parts):
            return 0
        count = {p: 1 if isinstance(part, torch.optim.Muon) else 2 for p, part in self._part_of.items()}
        return sum(count[p] * local(p).nbytes for p in self._parameters)

    def moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of one parameter; zeros before its first update."""
        part = self._part_of[parameter]
        known: dict[str, torch.Tensor] | None = part.state.get(parameter)
        if known:
            return known
        if isinstance(part, torch.optim.Muon):
            return {_MUON_STATE: torch.zeros_like(parameter, requires_grad=False)}
        return {
            "step": torch.zeros((), device=parameter.device),  # where the fused optimiser keeps it
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }

    def restore(self, moments: Mapping[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """Continue from this state of each parameter."""
        for parameter, state in moments.items():
            self._part_of[parameter].state[parameter] = state

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
        rate = learning_rate(step, spec=self._spec, steps=self._steps)
        sum_partial([local(p.grad) for p in self._partial if p.grad is not None], group=self._tensor_group)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        parts = [local(gradient) for gradient in gradients]
        torch._foreach_mul_(parts, scale)
        norm = global_norm(gradients)
        finite = bool(torch.isfinite(norm))
        if finite:
            torch._foreach_mul_(parts, torch.clamp(self._spec.gradient_clip_norm / (norm + _NORM_FLOOR), max=1.0))
            for part in self._parts:
                for group in part.param_groups:
                    group["lr"] = rate
                part.step()
        return {
            "gradient_norm": float(norm) if finite else 0.0,
            "learning_rate": rate,
            "skipped_nonfinite_steps": float(not finite),
        }


def muon_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained matrices of the transformer blocks: neither embeddings, heads, norms nor stacks of experts."""
    found = (p for block in blocks_of(model) for p in block.parameters() if p.requires_grad and p.ndim == _MATRIX)
    return list({id(p): p for p in found}.values())


class _ShardedMuon(torch.optim.Muon):
    """Muon of matrices whose rows lie on all ranks; torch's own computes the direction of a whole one."""

    def __init__(self, matrices: list[torch.nn.Parameter], *, weight_decay: float, device: torch.device) -> None:
        """`device`: where directions are computed; with CPU offload the rows lie elsewhere."""
        super().__init__(matrices, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._device = device

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # gradients are there already
        """Update each matrix by the gradient that it has; a collective if they are sharded."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if _MUON_STATE not in state:
                    state[_MUON_STATE] = torch.zeros_like(parameter, requires_grad=False)
                momentum = group["momentum"]
                state[_MUON_STATE].lerp_(parameter.grad, 1 - momentum)
                nesterov = parameter.grad.lerp(state[_MUON_STATE], momentum)
                change = self._change(full(nesterov).to(self._device), group=group)
                part = local(parameter)
                change = part_of(change, parameter)
                part.mul_(1 - group["lr"] * group["weight_decay"]).add_(change.to(part.device))

    @staticmethod
    def _change(whole: torch.Tensor, *, group: Mapping[str, Any]) -> torch.Tensor:
        """Return what torch's Muon adds to a matrix whose momentum is `whole`, without its decay."""
        change = torch.nn.Parameter(torch.zeros_like(whole))
        change.grad = whole
        alone = torch.optim.Muon(
            [change], lr=group["lr"], weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=group["adjust_lr_fn"]
        )
        alone.step()  # type: ignore[no-untyped-call] # torch's
        return change.detach()
