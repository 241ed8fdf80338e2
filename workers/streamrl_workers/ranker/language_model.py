"""The ranker `languageModel`: a small transformers model, fine-tuned to tell the logarithm of tokens.

    score(x) = head(pooled hidden states of the prompt)
    loss     = Huber(score, target)          target: log(1 + tokens), standardised (`pairs.py`)

StreamRL (arXiv 2504.15930, section 5) fine-tunes such a model on (prompt, output length) pairs and goes on while lengths
drift; only ranks are used. All weights are trained (AdamW, linear rise and fall over a round). Its folder: model and
tokenizer as `save_pretrained` writes them, `head.safetensors`, `ranker.json`, and the pairs that it has learnt.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from streamrl.errors import UserError
from streamrl_workers.ranker.backbone import Backbone, head, load_backbone, pooled, save_backbone
from streamrl_workers.ranker.folders import FOLDER_FILE, HEAD_FILE, folder_document

LEARNING_RATE = 2e-5
"""Usual for fine-tuning models of 0.1 to 1 B parameters; small ones take more (`--learning-rate`)."""
_HEAD_RATE = 10.0
"""The head starts from nothing: so many times the learning rate."""
_RISE_SHARE = 0.1
_CLIP_NORM = 1.0
_WEIGHT_DECAY = 0.01
_SCORED_AT_ONCE = 64


class LanguageModel:
    """A model with a head."""

    def __init__(self, backbone: Backbone, readout: nn.Linear, *, learning_rate: float = LEARNING_RATE) -> None:
        self._backbone = backbone
        self._head = readout.to(backbone.device)
        self._learning_rate = learning_rate

    @classmethod
    def fresh(cls, backbone: Backbone, *, learning_rate: float | None = None) -> "LanguageModel":
        """One that has learnt nothing."""
        return cls(backbone, head(backbone.width), learning_rate=learning_rate or LEARNING_RATE)

    def tuning(
        self, examples: Sequence[tuple[str, float]], *, passes: int, batch_prompts: int, seed: int
    ) -> Iterator[None]:
        """Learn (prompt, target) in shuffled passes; yields after each mini-batch, scores may be asked then.

        A mini-batch whose loss or gradient is not finite is passed over.
        """
        rate, chosen, draw = self._learning_rate, list(examples), Random(seed)
        optimizer = torch.optim.AdamW(
            [
                {"params": self._backbone.model.parameters(), "lr": rate},
                {"params": self._head.parameters(), "lr": rate * _HEAD_RATE},
            ],
            weight_decay=_WEIGHT_DECAY,
        )
        steps = passes * math.ceil(len(chosen) / batch_prompts)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps=steps))
        for _ in range(passes):
            draw.shuffle(chosen)
            for first in range(0, len(chosen), batch_prompts):
                self._learn(chosen[first : first + batch_prompts], optimizer)
                schedule.step()
                yield

    def _learn(self, examples: Sequence[tuple[str, float]], optimizer: torch.optim.Optimizer) -> None:
        self._backbone.model.train()
        target_B = torch.tensor([target for _, target in examples], device=self._backbone.device)
        loss = nn.functional.huber_loss(self._forward([prompt for prompt, _ in examples]), target_B)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        weights = [*self._backbone.model.parameters(), *self._head.parameters()]
        norm = nn.utils.clip_grad_norm_(weights, _CLIP_NORM)
        if torch.isfinite(norm):
            optimizer.step()
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
        """The folder, which exists; `ranker.json` last."""
        save_backbone(self._backbone, path)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in self._head.state_dict().items()}, path / HEAD_FILE
        )
        document = {"ranker": "languageModel", "learningRate": self._learning_rate}
        (path / FOLDER_FILE).write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path, *, field: str) -> "LanguageModel":
        """What `save` wrote. Raises `UserError`; `field` names the path."""
        backbone = load_backbone(str(path), field=field)
        readout = head(backbone.width)
        try:
            readout.load_state_dict(load_file(path / HEAD_FILE))
            learning_rate = float(folder_document(path).get("learningRate", LEARNING_RATE))
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise UserError(field=field, rule=f"{HEAD_FILE} cannot be read: {line}", got=str(path)) from error
        return cls(backbone, readout, learning_rate=learning_rate)


def exhaust(steps: Iterable[None]) -> None:
    """Run all mini-batches at once."""
    for _ in steps:
        pass


def _share(step: int, *, steps: int) -> float:
    """Of the learning rate: linear to 1, then linear to 0 at the last step."""
    rise = max(1, round(_RISE_SHARE * steps))
    return (step + 1) / rise if step < rise else max(0.0, (steps - step) / max(1, steps - rise))
