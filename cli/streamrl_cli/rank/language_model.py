"""The ranker `languageModel`: a small transformers model, fine-tuned to tell the logarithm of tokens.

    score(x) = head(pooled hidden states of the prompt)
    loss     = Huber(score, (log(1 + tokens) - mean) / deviation)

StreamRL (arXiv 2504.15930, section 5) fine-tunes such a model on (prompt, output length) pairs; only ranks are used.
All weights are trained (AdamW, linear rise and fall). Its folder: model and tokenizer as `save_pretrained` writes them,
`head.safetensors`, `ranker.json`.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from streamrl.errors import UserError
from streamrl_cli.rank.backbone import Backbone, head, load_backbone, pooled, save_backbone
from streamrl_cli.rank.offline import FOLDER_FILE, FitOptions
from streamrl_cli.rank.pairs import Pair

PASSES = 3
LEARNING_RATE = 2e-5
"""Usual for fine-tuning models of 0.1 to 1 B parameters; small ones take more (`--learning-rate`)."""
_HEAD_RATE = 10.0
"""The head starts from nothing: so many times the learning rate."""
_RISE_SHARE = 0.1
_CLIP_NORM = 1.0
_WEIGHT_DECAY = 0.01
_HEAD_FILE = "head.safetensors"
_SCORED_AT_ONCE = 64


class LanguageModel:
    """A model with a head."""

    def __init__(self, backbone: Backbone, readout: nn.Linear) -> None:
        self._backbone = backbone
        self._head = readout.to(backbone.device)

    @classmethod
    def fit(cls, pairs: Sequence[Pair], *, options: FitOptions) -> "LanguageModel":
        """Fine-tune the model that the options name."""
        torch.manual_seed(options.seed)
        backbone = load_backbone(options.model)
        made = cls(backbone, head(backbone.width))
        made._train(pairs, options)
        return made

    def _train(self, pairs: Sequence[Pair], options: FitOptions) -> None:
        logs = [math.log1p(pair.tokens) for pair in pairs]
        mean, deviation = statistics.fmean(logs), statistics.pstdev(logs) or 1.0
        targets = {pair.prompt: (log - mean) / deviation for pair, log in zip(pairs, logs, strict=True)}
        rate, passes, size = options.learning_rate or LEARNING_RATE, options.passes or PASSES, options.batch_prompts
        optimizer = torch.optim.AdamW(
            [
                {"params": self._backbone.model.parameters(), "lr": rate},
                {"params": self._head.parameters(), "lr": rate * _HEAD_RATE},
            ],
            weight_decay=_WEIGHT_DECAY,
        )
        steps = passes * math.ceil(len(pairs) / size)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps=steps))
        prompts, draw = [pair.prompt for pair in pairs], Random(options.seed)
        self._backbone.model.train()
        for _ in range(passes):
            draw.shuffle(prompts)
            for first in range(0, len(prompts), size):
                chosen = prompts[first : first + size]
                target_B = torch.tensor([targets[prompt] for prompt in chosen], device=self._backbone.device)
                loss = nn.functional.huber_loss(self._forward(chosen), target_B)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
                nn.utils.clip_grad_norm_([*self._backbone.model.parameters(), *self._head.parameters()], _CLIP_NORM)
                optimizer.step()
                schedule.step()
        self._backbone.model.train(mode=False)

    def _forward(self, prompts: Sequence[str]) -> torch.Tensor:
        ((ids_BT, mask_BT),) = self._backbone.batches(prompts, size=len(prompts))
        hidden_BTD = self._backbone.model(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
        scores_B: torch.Tensor = self._head(pooled(hidden_BTD, mask_BT)).squeeze(-1)
        return scores_B

    @torch.inference_mode()
    def scores(self, prompts: Sequence[str]) -> list[float]:
        """Standardised logarithms of tokens."""
        found: list[float] = []
        for first in range(0, len(prompts), _SCORED_AT_ONCE):
            found += self._forward(prompts[first : first + _SCORED_AT_ONCE]).tolist()
        return found

    def save(self, path: Path) -> None:
        """The whole folder, `ranker.json` last."""
        if path.is_file():
            raise UserError(field="--out", rule="must be a folder for this ranker", got=str(path))
        path.mkdir(parents=True, exist_ok=True)
        save_backbone(self._backbone, path)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in self._head.state_dict().items()}, path / _HEAD_FILE
        )
        (path / FOLDER_FILE).write_text(json.dumps({"ranker": "languageModel"}) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "LanguageModel":
        """What `save` wrote. Raises `UserError`."""
        backbone = load_backbone(str(path))
        readout = head(backbone.width)
        try:
            readout.load_state_dict(load_file(path / _HEAD_FILE))
        except Exception as error:
            raise UserError(field="FILE", rule=f"{_HEAD_FILE} cannot be read: {error}", got=str(path)) from error
        return cls(backbone, readout)


def _share(step: int, *, steps: int) -> float:
    """Of the learning rate: linear to 1, then linear to 0 at the last step."""
    rise = max(1, round(_RISE_SHARE * steps))
    return (step + 1) / rise if step < rise else max(0.0, (steps - step) / max(1, steps - rise))
