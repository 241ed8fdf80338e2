"""The value model of PPO: the initial model's body with a scalar head, and its loss.

The value of a token is that of the text before it, so it is read at the position that predicts the token. Values are
zero at the start: the head's weights are zeros, and every rank begins alike.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from streamrl_workers.trainer.engines.forward import MicroBatch


class ValueModel(torch.nn.Module):
    """Text in, one number for each position out."""

    def __init__(self, body: torch.nn.Module, *, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ValueModel":
        """Takes the body of a causal language model, which is the critic's own from now on; its head is left behind."""
        body: Any = model.base_model
        return cls(body, hidden_size=model.config.get_text_config().hidden_size)

    def forward(self, inputs_BL: torch.Tensor) -> torch.Tensor:
        """Values [B, L]."""
        hidden_BLH = self.body(input_ids=inputs_BL, use_cache=False).last_hidden_state
        values: torch.Tensor = self.head(hidden_BLH).squeeze(-1).to(torch.float32, copy=True)  # FSDP hooks no views
        return values


def token_values(critic: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Value of the text before each trained token [N], with gradient."""
    values_BL: torch.Tensor = critic(batch.inputs_BL)
    return values_BL[:, batch.first :].flatten().index_select(0, batch.rows_N)


def value_loss(
    values_N: torch.Tensor, *, start_N: torch.Tensor, returns_N: torch.Tensor, value_clip: float
) -> torch.Tensor:
    """Squared error of each token, pessimistic about moves beyond the clip (PPO's reference code, `vf_loss`).

    1/2 max((V - G)^2, (clip(V, V_start - c, V_start + c) - G)^2)
    """
    clipped_N = start_N + (values_N - start_N).clamp(-value_clip, value_clip)
    return torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square()) / 2.0
