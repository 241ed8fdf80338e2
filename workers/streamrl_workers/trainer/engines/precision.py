"""Number formats: float32 weights and optimiser always; with BF16 the passes and the published weights are bfloat16.

Owns: which hardware has it, how a model on one rank computes in it. Does not own: the same above one rank (`sharding.py`).
"""

from typing import Literal

import torch

from streamrl.errors import UserError

Precision = Literal["FP32", "BF16"]


def published_dtype(precision: Precision) -> torch.dtype:
    """Format of published and exported weights, and of generators."""
    return torch.bfloat16 if precision == "BF16" else torch.float32


def check_hardware(precision: Precision, *, device: torch.device) -> None:
    """Raise UserError where the hardware does not compute in the format: emulated it is slower than float32."""
    if precision == "BF16" and not has_bf16(device):
        raise UserError(
            field="spec.trainer.precision",
            rule="must be FP32 on hardware without bfloat16 arithmetic",
            got=precision,
            fix="set FP32, or train on a GPU or processor that has it",
        )


def has_bf16(device: torch.device) -> bool:
    """GPU: what torch says without emulation; processor: a feature that names it (avx512_bf16, amx_bf16, Arm's bf16)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return any(name.endswith("bf16") for name, present in torch.cpu.get_capabilities().items() if present is True)


def compute_in(model: torch.nn.Module, *, dtype: torch.dtype, device: torch.device) -> None:
    """Let every forward pass of the model run under autocast; sums of long rows stay in float32, as autocast knows."""
    model.forward = torch.autocast(device.type, dtype=dtype)(model.forward)
