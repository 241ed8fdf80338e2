"""The ranker `languageModel`: a small transformers model, fine-tuned to tell the logarithm of tokens, and tuned on in the run.

    score(x) = head(pooled hidden states of the prompt)
    loss     = Huber(score, target)          target: log(1 + tokens), standardised (`pairs.py`)

StreamRL (arXiv 2504.15930, section 5) fine-tunes such a model on (prompt, output length) pairs and goes on while lengths
drift; only ranks are used. All weights are trained (AdamW, linear rise and fall over a round). Its folder: model and
tokenizer as `save_pretrained` writes them, `head.safetensors` and `ranker.json`.
Any model that `AutoModel` knows: encoders and causal models. Of a prompt that is too long the end is read.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from streamrl.errors import UserError
from streamrl.files import read_json
from streamrl_workers.models.load import load_encoder
from streamrl_workers.ranker.folder import FOLDER_FILE, HEAD_FILE
from streamrl_workers.ranker.pairs import standardised
from streamrl_workers.stream.run_folder import write_json_atomically

MAX_TOKENS = 1024
"""Of a prompt; lengths are decided by what is asked, which longer prompts repeat."""
_HEAD_RATE = 10.0
"""The head starts from nothing: so many times the learning rate."""
_RISE_SHARE = 0.1
_CLIP_NORM = 1.0
_WEIGHT_DECAY = 0.01
_SCORED_AT_ONCE = 64


class LanguageModel:
    """A model with a head."""

    def __init__(self, model: Any, tokenizer: Any, *, learning_rate: float) -> None:  # noqa: ANN401 - of transformers
        """A model without its language head, and its tokenizer. The head starts at 0, the mean."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = model.config.get_text_config()
        self._model = model.to(device).train(mode=False)
        self._tokenizer = tokenizer
        self._max_tokens = min(MAX_TOKENS, getattr(config, "max_position_embeddings", None) or MAX_TOKENS)
        self._head = nn.Linear(2 * int(config.hidden_size), 1, device=device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._learning_rate = learning_rate

    @classmethod
    def of(cls, path: str, *, learning_rate: float, field: str) -> "LanguageModel":
        """The transformers model of this name or directory, in float32. Raises `UserError`; `field` names the path."""
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # untyped in transformers
        try:
            model, tokenizer = load_encoder(path)
        except UserError as error:
            fix = "give a directory as save_pretrained writes it, or a name on the hub"
            raise UserError(field=field, rule=error.rule, got=path, fix=fix) from error
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise UserError(field=field, rule="must have a pad or an end token", got=path)
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.padding_side, tokenizer.truncation_side = "right", "left"
        return cls(model, tokenizer, learning_rate=learning_rate)

    @classmethod
    def fitted(
        cls,
        known: Sequence[tuple[str, float]],
        *,
        model: str,
        passes: int,
        learning_rate: float,
        batch_prompts: int,
        seed: int,
    ) -> "LanguageModel":
        """That model, fine-tuned on pairs (prompt, tokens). Raises `UserError`."""
        torch.manual_seed(seed)
        fitted = cls.of(model, learning_rate=learning_rate, field="--model")
        targets = standardised([tokens for _, tokens in known])
        examples = [(prompt, target) for (prompt, _), target in zip(known, targets, strict=True)]
        for _ in fitted.tuning(examples, passes=passes, batch_prompts=batch_prompts, seed=seed):
            pass
        return fitted

    def tuning(
        self, examples: Sequence[tuple[str, float]], *, passes: int, batch_prompts: int, seed: int
    ) -> Iterator[None]:
        """Learn (prompt, target) in shuffled passes; yields after each mini-batch, scores may be asked then.

        A mini-batch whose loss or gradient is not finite is passed over.
        """
        rate, chosen, draw = self._learning_rate, list(examples), Random(seed)
        optimizer = torch.optim.AdamW(
            [
                {"params": self._model.parameters(), "lr": rate},
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
        self._model.train()
        target_B = torch.tensor([target for _, target in examples], device=self._head.weight.device)
        loss = nn.functional.huber_loss(self._forward([prompt for prompt, _ in examples]), target_B)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        weights = [*self._model.parameters(), *self._head.parameters()]
        norm = nn.utils.clip_grad_norm_(weights, _CLIP_NORM)
        if torch.isfinite(norm):
            optimizer.step()
        self._model.train(mode=False)

    def _forward(self, prompts: Sequence[str]) -> Tensor:
        encoded = self._tokenizer(
            list(prompts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._head.weight.device)
        mask_BT = encoded["attention_mask"]
        hidden_BTD = self._model(input_ids=encoded["input_ids"], attention_mask=mask_BT).last_hidden_state
        scores_B: Tensor = self._head(pooled(hidden_BTD, mask_BT)).squeeze(-1)
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
        self._model.save_pretrained(path)
        self._tokenizer.save_pretrained(path)
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in self._head.state_dict().items()}, path / HEAD_FILE
        )
        document = {"ranker": "languageModel", "learningRate": self._learning_rate}
        write_json_atomically(path / FOLDER_FILE, document)

    @classmethod
    def load(cls, path: Path, *, field: str) -> "LanguageModel":
        """What `save` wrote. Raises `UserError`; `field` names the path."""
        try:
            found = cls.of(str(path), learning_rate=float(read_json(path / FOLDER_FILE)["learningRate"]), field=field)
            found._head.load_state_dict(load_file(path / HEAD_FILE))
        except UserError:
            raise
        except Exception as error:
            line = str(error).strip().split("\n")[0]
            raise UserError(field=field, rule=f"cannot be read: {line}", got=str(path)) from error
        return found


def _share(step: int, *, steps: int) -> float:
    """Of the learning rate: linear to 1, then linear to 0 at the last step."""
    rise = max(1, round(_RISE_SHARE * steps))
    return (step + 1) / rise if step < rise else max(0.0, (steps - step) / max(1, steps - rise))


def pooled(hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the prompt and its last token side by side: B x 2D. The first suits encoders, the second causal models."""
    mask_BT1 = mask_BT.unsqueeze(-1).to(hidden_BTD.dtype)
    mean_BD = (hidden_BTD * mask_BT1).sum(1) / mask_BT1.sum(1).clamp(min=1.0)
    last_B = mask_BT.sum(1).clamp(min=1).long() - 1
    return torch.cat([mean_BD, hidden_BTD[torch.arange(len(last_B), device=last_B.device), last_B]], dim=1)
