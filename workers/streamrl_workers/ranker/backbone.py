"""A transformers model without its language head, and prompts as its batches. Owns loading, cutting and pooling.

Any model that `AutoModel` knows: encoders and causal models. Of a prompt that is too long the end is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

from streamrl.errors import UserError, shorten

MAX_TOKENS = 1024
"""Of a prompt; lengths are decided by what is asked, which longer prompts repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """Model and tokenizer on one device."""

    model: Any
    tokenizer: Any
    device: torch.device
    max_tokens: int

    @property
    def width(self) -> int:
        """Numbers in a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    def batches(self, prompts: Sequence[str], *, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Token ids and mask, padded on the right: B prompts of at most T tokens each."""
        for first in range(0, len(prompts), size):
            encoded = self.tokenizer(
                list(prompts[first : first + size]),
                padding=True,
                truncation=True,
                max_length=self.max_tokens,
                return_tensors="pt",
            )
            yield encoded["input_ids"].to(self.device), encoded["attention_mask"].to(self.device)


def load_backbone(path: str, *, field: str) -> Backbone:
    """The model in float32, in eval mode, on the GPU where there is one.

    Raises:
        UserError: it cannot be loaded; `field` names the path.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # untyped in transformers
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModel.from_pretrained(path, dtype=torch.float32)
    except Exception as error:
        raise UserError(
            field=field,
            rule=f"cannot be loaded: {type(error).__name__}: {shorten(str(error).strip().split(chr(10))[0])}",
            got=path,
            fix="give a directory as save_pretrained writes it, or a name on the hub",
        ) from error
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(field=field, rule="must have a pad or an end token", got=path)
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train(mode=False)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or MAX_TOKENS
    return Backbone(model=model, tokenizer=tokenizer, device=device, max_tokens=min(MAX_TOKENS, positions))


def pooled(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the prompt and its last token side by side: B x 2D. The first suits encoders, the second causal models."""
    mask_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
    mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1.0)
    last_B = mask_BT.sum(1).clamp(min=1).long() - 1
    return torch.cat([mean_BD, hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]], dim=1)


def save_backbone(backbone: Backbone, path: Path) -> None:
    """As `load_backbone` reads it."""
    backbone.model.save_pretrained(path)
    backbone.tokenizer.save_pretrained(path)


def head(width: int) -> nn.Linear:
    """From what `pooled` gives to one number; starts at 0, the mean."""
    linear = nn.Linear(2 * width, 1)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
