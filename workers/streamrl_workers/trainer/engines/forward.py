"""The forward pass of a micro-batch: token log-probs and entropies at the sampling temperature.

Owns: tensors of a batch, which logits predict which token. Does not own: the loss, which samples go together.
Legend: B sequences, L padded input tokens, N completion tokens of all of them, V vocabulary.

Padding is on the right and needs no mask: in a causal model nothing behind a token can change it. So attention takes
its fastest path, and every causal architecture is served alike.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from streamrl_workers.trainer.engines.packing import Sample

_ENTROPY_ELEMENTS = 2**24
"""Logits whose entropy is formed at once: bounds the extra memory to some 64 MiB a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass."""

    inputs_BL: torch.Tensor  # int64, padded on the right
    first: int  # no logits are needed before this column
    rows_N: torch.Tensor  # which of the B * (L - first) remaining logits predicts the token
    targets_N: torch.Tensor  # int64
    behaviour_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor  # of the token in the sum of losses
    fresh_N: torch.Tensor  # bool: drawn under the very weights that are trained now


def make_batch(
    samples: Sequence[Sample], *, aggregation: Literal["SequenceMean", "TokenMean"], device: torch.device
) -> MicroBatch:
    """The tensors of `samples`."""
    length = max(sample.inputs for sample in samples)
    first = min(sample.prompt_tokens for sample in samples) - 1
    inputs_BL = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, sample in enumerate(samples):
        inputs_BL[row, : sample.inputs] = torch.tensor(sample.tokens[:-1])
    mean = aggregation == "SequenceMean"
    counts_B = torch.tensor([sample.completion_tokens for sample in samples])
    advantages_B = torch.tensor([sample.advantage for sample in samples])
    weights_B = 1.0 / counts_B if mean else torch.ones(len(samples))
    return MicroBatch(
        inputs_BL=inputs_BL.to(device),
        first=first,
        rows_N=torch.cat([_rows(s, row=i, width=length - first, first=first) for i, s in enumerate(samples)]).to(
            device
        ),
        targets_N=torch.cat([torch.tensor(s.tokens[s.prompt_tokens :], dtype=torch.int64) for s in samples]).to(device),
        behaviour_N=torch.cat([torch.tensor(s.behaviour) for s in samples]).to(device),
        advantages_N=advantages_B.repeat_interleave(counts_B).to(device),
        weights_N=weights_B.repeat_interleave(counts_B).to(device),
        fresh_N=torch.cat([_fresh(s) for s in samples]).to(device),
    )


def _rows(sample: Sample, *, row: int, width: int, first: int) -> torch.Tensor:
    """The token at place p is predicted by the logits at p - 1."""
    begin = row * width + sample.prompt_tokens - 1 - first
    return torch.arange(begin, begin + sample.completion_tokens)


def _fresh(sample: Sample) -> torch.Tensor:
    tokens = torch.tensor([tokens for tokens, _ in sample.fresh])
    return torch.tensor([fresh for _, fresh in sample.fresh]).repeat_interleave(tokens)


class Forward:
    """A model's log-probs of given tokens."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        self._model = model
        self._temperature = temperature
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of every target [N], with gradient, and entropy of its distribution [N], without."""
        logits_NV = self._logits(batch)
        if self._temperature != 1.0:
            logits_NV = logits_NV / self._temperature
        normaliser_N = logits_NV.logsumexp(-1)
        chosen_N = logits_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
        return chosen_N - normaliser_N, _entropy(logits_NV.detach(), normaliser_N.detach())

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        length = batch.inputs_BL.shape[1]
        keep = {"logits_to_keep": length - batch.first} if self._keeps_logits else {}
        logits: torch.Tensor = self._model(input_ids=batch.inputs_BL, use_cache=False, **keep).logits
        kept = logits if self._keeps_logits else logits[:, batch.first :]
        return kept.flatten(0, 1).index_select(0, batch.rows_N)


@torch.no_grad()
def _entropy(logits_NV: torch.Tensor, normaliser_N: torch.Tensor) -> torch.Tensor:
    rows = max(1, _ENTROPY_ELEMENTS // logits_NV.shape[1])
    parts = [
        normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
        for logits, normaliser in zip(torch.split(logits_NV, rows), torch.split(normaliser_N, rows), strict=True)
    ]
    return torch.cat(parts)
