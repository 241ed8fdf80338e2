"""The forward pass of a micro-batch: token log-probs and entropies at the sampling temperature.

Owns: tensors of a batch, which logits predict which token. Does not own: the loss, which samples go together.
Legend: B sequences, L padded input tokens, N trained tokens of all of them, V vocabulary.

Padding is on the right and needs no mask: in a causal model nothing behind a token can change it. So attention takes
its fastest path, and every causal architecture is served alike.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from streamrl_workers.trainer.algorithms.rule import Aggregation
from streamrl_workers.trainer.engines.packing import Sample

_ENTROPY_ELEMENTS = 2**24
"""Logits whose entropy is formed at once: bounds the extra memory to some 64 MiB a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass."""

    inputs_BL: torch.Tensor  # int64, padded on the right
    first: int  # no logits are needed before this column
    rows_N: torch.Tensor  # which of the B * (L - first) remaining positions predicts the token
    targets_N: torch.Tensor  # int64
    behaviour_N: torch.Tensor
    advantages_N: torch.Tensor
    sequences_N: torch.Tensor  # int64: row of the token's sequence
    weights_N: torch.Tensor  # of the token in the sum of losses
    fresh_N: torch.Tensor  # bool: drawn under the very weights that are trained now
    proximal_N: torch.Tensor | None  # the rest: where every sample has it
    reference_N: torch.Tensor | None
    values_N: torch.Tensor | None
    returns_N: torch.Tensor | None


def make_batch(samples: Sequence[Sample], *, aggregation: Aggregation, device: torch.device) -> MicroBatch:
    """The tensors of `samples`."""
    length = max(sample.inputs for sample in samples)
    first = min((sample.places_N[0] - 1 for sample in samples if sample.trained), default=0)
    inputs_BL = torch.zeros(len(samples), length, dtype=torch.int64)
    for row, sample in enumerate(samples):
        inputs_BL[row, : sample.inputs] = torch.tensor(sample.tokens[:-1])
    counts_B = torch.tensor([sample.trained for sample in samples])
    weights_B = 1.0 / counts_B.clamp(min=1) if aggregation == "SequenceMean" else torch.ones(len(samples))
    targets = [sample.tokens[place] for sample in samples for place in sample.places_N]
    return MicroBatch(
        inputs_BL=inputs_BL.to(device),
        first=first,
        rows_N=_rows(samples, width=length - first, first=first).to(device),
        targets_N=torch.tensor(targets, dtype=torch.int64, device=device),
        behaviour_N=_joined([sample.behaviour_N for sample in samples], device=device),
        advantages_N=_joined([sample.advantages_N for sample in samples], device=device),
        sequences_N=torch.arange(len(samples)).repeat_interleave(counts_B).to(device),
        weights_N=weights_B.repeat_interleave(counts_B).to(device),
        fresh_N=_joined([sample.fresh_N for sample in samples], device=device).bool(),
        proximal_N=_optional([sample.proximal_N for sample in samples], device=device),
        reference_N=_optional([sample.reference_N for sample in samples], device=device),
        values_N=_optional([sample.values_N for sample in samples], device=device),
        returns_N=_optional([sample.returns_N for sample in samples], device=device),
    )


def _rows(samples: Sequence[Sample], *, width: int, first: int) -> torch.Tensor:
    """The token at place p is predicted by the logits at p - 1."""
    rows = [row * width + place - 1 - first for row, sample in enumerate(samples) for place in sample.places_N]
    return torch.tensor(rows, dtype=torch.int64)


def _joined(parts: Sequence[Sequence[float]], *, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.tensor(part, dtype=torch.float32) for part in parts]).to(device)


def _optional(parts: Sequence[Sequence[float] | None], *, device: torch.device) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    assert len(known) in {0, len(parts)}, "a number that some samples of a pass have and others lack"
    return _joined(known, device=device) if known else None


class Forward:
    """A model's log-probs of given tokens."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        self._model = model
        self._temperature = temperature
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-prob of every target [N], with gradient."""
        logprobs_N, _, _ = self._parts(batch)
        return logprobs_N

    def logprobs_entropy(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of every target [N], with gradient, and entropy of its distribution [N], without."""
        logprobs_N, logits_NV, normaliser_N = self._parts(batch)
        return logprobs_N, _entropy(logits_NV.detach(), normaliser_N.detach())

    def _parts(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits_NV = self._logits(batch)
        if self._temperature != 1.0:
            logits_NV = logits_NV / self._temperature
        normaliser_N = logits_NV.logsumexp(-1)
        chosen_N = logits_NV.gather(1, batch.targets_N.unsqueeze(1)).squeeze(1)
        return chosen_N - normaliser_N, logits_NV, normaliser_N

    def _logits(self, batch: MicroBatch) -> torch.Tensor:
        length = batch.inputs_BL.shape[1]
        keep = {"logits_to_keep": length - batch.first} if self._keeps_logits else {}
        logits: torch.Tensor = self._model(input_ids=batch.inputs_BL, use_cache=False, **keep).logits
        kept = logits if self._keeps_logits else logits[:, batch.first :]
        return kept.flatten(0, 1).index_select(0, batch.rows_N).float()


@torch.no_grad()
def _entropy(logits_NV: torch.Tensor, normaliser_N: torch.Tensor) -> torch.Tensor:
    rows = max(1, _ENTROPY_ELEMENTS // logits_NV.shape[1])
    parts = [
        normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
        for logits, normaliser in zip(torch.split(logits_NV, rows), torch.split(normaliser_N, rows), strict=True)
    ]
    return torch.cat(parts)
