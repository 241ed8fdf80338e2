"""Forward passes of a micro-batch, and what is measured on them: token log-probs, entropies, values; a step's sums.

Owns: tensors of a batch, which position predicts which token, the critic and its loss, the reference, sums over trained tokens.
Does not own: logits (`logprobs.py`), the loss of the policy (`algorithms/`), which samples go together (`packing.py`).
Legend: B rows, L input tokens of each with padding, N trained tokens of all of them, V vocabulary, H hidden size.

Samples of a pass lie one after the other in one row, as documents with positions of their own (`models/documents.py`). For a model that
cannot be given such rows each sample is a row, padded on the right. That needs no mask: in a causal model nothing after a token can
change it. A model that switches its rotary factors by length (`models/rope.py`) gets positions in either case; a sample that crosses
the switch is two documents, each with the tokens that were drawn on its side.

Ranks of a context group have the same samples. Each reads its own tokens of the row (`models/row_share.py`); the rest of a batch, and every
result, is of all tokens on each rank.

PPO's critic is the initial model's body with a scalar head. The value of a token is that of the text before it, so it is read
at the position that predicts the token. Values are zero at the start: the head's weights are zeros, and every rank begins alike.

ArCHer's has four heads, two of states and two of utterances. The former are read as PPO's; the latter at the token itself: the value of
the text that ends with it. Their weights are small and differ, from the job's seed. A copy of it all follows slowly.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from streamrl_workers.metrics.logprob_diff import CLIPPED, LAGS, key, pool_lag, pool_lags
from streamrl_workers.models.documents import Documents, documents_of
from streamrl_workers.models.rope import own_positions, row_positions, split_at_switch
from streamrl_workers.models.row_share import RowShare
from streamrl_workers.trainer.algorithms.algorithm import Aggregation, TokenBatch, TokenLoss
from streamrl_workers.trainer.algorithms.objective import Estimator, kl_divergence
from streamrl_workers.trainer.engines.packing import PackedSample
from streamrl_workers.trainer.engines.sharding import local

Reference = Callable[[], AbstractContextManager[PreTrainedModel]]
"""Gives the initial model, which a divergence is measured from, while the context lasts. Never trained, never in a checkpoint."""
_SUMS = (
    "ratio",
    "clipped",
    "kl",
    "entropy",
    "tokens",
    "weight",
    "masked",
    "reference_kl",
)
_HEAD_STD = 0.02
"""Of the initial weights of utterances' heads: far below the values that they are to learn."""
_LOSSES = ("loss", "value_loss")
"""Sums of an update until it ends, then scaled as its gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass."""

    inputs_BL: torch.Tensor  # int64; this rank's tokens of one row of documents, or rows that are padded on the right
    positions_BL: torch.Tensor | None  # int64; None: the model numbers them itself
    documents: Documents | None  # of the one row; None: each row is a sequence
    rows_N: torch.Tensor  # which of the B * L positions predicts the token
    targets_N: torch.Tensor  # int64
    behaviour_N: torch.Tensor
    advantages_N: torch.Tensor
    sequences_N: torch.Tensor  # int64: row of the token's sequence
    weights_N: torch.Tensor  # of the token in the sum of losses
    proximal_N: torch.Tensor | None  # the rest: where every sample has it
    reference_N: torch.Tensor | None
    kept_N: torch.Tensor | None
    values_N: torch.Tensor | None
    returns_N: torch.Tensor | None

    @property
    def share(self) -> RowShare | None:
        """This rank's share of the row; None: it has all of it."""
        return None if self.documents is None else self.documents.share

    @property
    def places(self) -> int:
        """Tokens of the pass, padding included."""
        return self.inputs_BL.numel() * (1 if self.share is None else self.share.ranks)


def make_batch(
    samples: Sequence[PackedSample],
    *,
    aggregation: Aggregation,
    device: torch.device,
    packed: bool = False,
    whole: bool = False,
    switch: int | None = None,
    context: dist.ProcessGroup | None = None,
) -> MicroBatch:
    """The tensors of `samples`.

    `packed`: one row of documents; else a padded row each. `whole`: the last token, which predicts nothing, is read too.
    `switch`: the model's (`models/rope.py`). `context`: the ranks that share the row.
    """
    documents = [
        (sample.tokens[: (places[-1] if places else sample.inputs) + whole], places)
        for sample in samples
        for places in split_at_switch(sample.places_N, switch)
    ]
    lengths = [len(tokens) for tokens, _ in documents]
    width = max(lengths)
    begins = list(accumulate(lengths, initial=0)) if packed else range(0, width * len(lengths) + 1, width)
    inputs = torch.zeros(begins[-1], dtype=torch.int64)
    for begin, (tokens, _) in zip(begins, documents, strict=False):
        inputs[begin : begin + len(tokens)] = torch.tensor(tokens)
    inputs_BL = inputs.view(1 if packed else len(documents), -1)
    positions_BL = _positions(lengths, packed=packed, switches=switch is not None)
    share = None
    if context is not None and positions_BL is not None:
        share = RowShare(group=context, tokens=begins[-1])
        inputs_BL, positions_BL = share.cut(inputs_BL), share.cut(positions_BL)
    counts_B = torch.tensor([sample.trained for sample in samples])
    of_samples_B = counts_B + torch.tensor([sample.trained_elsewhere for sample in samples])
    weights_B = 1.0 / of_samples_B.clamp(min=1) if aggregation == "SequenceMean" else torch.ones(len(samples))
    targets = [sample.tokens[place] for sample in samples for place in sample.places_N]
    return MicroBatch(
        inputs_BL=inputs_BL.to(device),
        positions_BL=None if positions_BL is None else positions_BL.to(device),
        documents=documents_of(lengths, device=device, share=share) if packed else None,
        rows_N=_rows([places for _, places in documents], begins=begins).to(device),
        targets_N=torch.tensor(targets, dtype=torch.int64, device=device),
        behaviour_N=_joined([sample.behaviour_N for sample in samples], device=device),
        advantages_N=_joined([sample.advantages_N for sample in samples], device=device),
        sequences_N=torch.arange(len(samples)).repeat_interleave(counts_B).to(device),
        weights_N=weights_B.repeat_interleave(counts_B).to(device),
        proximal_N=_optional([sample.proximal_N for sample in samples], device=device),
        reference_N=_optional([sample.reference_N for sample in samples], device=device),
        kept_N=_optional([sample.kept_N for sample in samples], device=device),
        values_N=_optional([sample.values_N for sample in samples], device=device),
        returns_N=_optional([sample.returns_N for sample in samples], device=device),
    )


def _positions(lengths: Sequence[int], *, packed: bool, switches: bool) -> torch.Tensor | None:
    if packed:
        return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    return row_positions(lengths, width=max(lengths)) if switches else None


def _rows(places_of: Sequence[Sequence[int]], *, begins: Sequence[int]) -> torch.Tensor:
    """The token at place p is predicted at p - 1."""
    rows = [begin + place - 1 for begin, places in zip(begins, places_of, strict=False) for place in places]
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
        """`model`: one that answers with log-probs (`logprobs.answer_logprobs`)."""
        self._model = model
        self._temperature = temperature

    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-prob of every target [N], with gradient."""
        logprobs_N, _ = self._call(batch, entropy=False)
        return logprobs_N

    def logprobs_entropy(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of every target [N], with gradient, and entropy of its distribution [N], without."""
        return self._call(batch, entropy=True)

    def _call(self, batch: MicroBatch, *, entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._model(
            batch.inputs_BL,
            positions_BL=batch.positions_BL,
            documents=batch.documents,
            rows_N=batch.rows_N,
            targets_N=batch.targets_N,
            temperature=self._temperature,
            entropy=entropy,
        )
        return found


class ValueModel(torch.nn.Module):
    """Text in, one number for each position out."""

    states, utterances = 1, 0
    """Heads that are read before a token, and at it."""

    @property
    def values_of_token(self) -> int:
        """Numbers that the critic gives for each trained token."""
        return self.states + self.utterances

    def __init__(self, body: torch.nn.Module, *, hidden_size: int) -> None:
        super().__init__()
        self.body = body
        self.head = torch.nn.Linear(hidden_size, self.states + self.utterances)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Takes the body of a causal language model, which is the critic's own from now on; its head is left behind."""
        body: Any = model.base_model
        return cls(body, hidden_size=model.config.get_text_config().hidden_size)

    def forward(
        self,
        inputs_BL: torch.Tensor,
        *,
        positions_BL: torch.Tensor | None = None,
        documents: Documents | None = None,
    ) -> torch.Tensor:
        """Values [B, L, heads]."""
        given = own_positions(positions_BL, documents)
        hidden_BLH = self.body(input_ids=inputs_BL, use_cache=False, **given).last_hidden_state
        values: torch.Tensor = self.head(hidden_BLH).to(torch.float32, copy=True)  # FSDP hooks no views
        return values

    def follow(self, rate: float) -> None:
        """Behind an update."""


class UtteranceValueModel(ValueModel):
    """Two values of each state, two of each utterance, and a copy of the model that is not trained."""

    states, utterances = 2, 2

    def __init__(self, body: torch.nn.Module, *, hidden_size: int) -> None:
        super().__init__(body, hidden_size=hidden_size)
        torch.nn.init.normal_(self.head.weight, std=_HEAD_STD)
        self.target = deepcopy(self).requires_grad_(requires_grad=False)

    def forward(
        self,
        inputs_BL: torch.Tensor,
        *,
        positions_BL: torch.Tensor | None = None,
        documents: Documents | None = None,
        target: bool = False,
    ) -> torch.Tensor:
        """Values [B, L, heads], or those of the copy."""
        passed = self.target if target else super().forward
        found: torch.Tensor = passed(inputs_BL, positions_BL=positions_BL, documents=documents)
        return found

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move the copy by this share of its way to the model."""
        for name in ("body", "head"):
            followers, leaders = (list(map(local, getattr(m, name).parameters())) for m in (self.target, self))
            torch._foreach_lerp_(followers, leaders, rate)


def critic_values(critic: ValueModel, batch: MicroBatch, **of: bool) -> torch.Tensor:
    """Values of each trained token [N * heads], with gradient: of the text before it, then of the text that ends with it."""
    found_BLH = critic(batch.inputs_BL, positions_BL=batch.positions_BL, documents=batch.documents, **of)
    values_PH: torch.Tensor = found_BLH.flatten(0, 1)
    if batch.share is not None:  # the token after a rank's last one is another rank's
        values_PH = batch.share.join_tokens(values_PH)
    before_NH = values_PH[:, : critic.states].index_select(0, batch.rows_N)
    if not critic.utterances:
        return before_NH.flatten()
    behind_NH = values_PH[:, critic.states :].index_select(0, batch.rows_N + 1)
    return torch.cat([before_NH, behind_NH], dim=1).flatten()


def value_loss(
    values_N: torch.Tensor,
    *,
    start_N: torch.Tensor,
    returns_N: torch.Tensor,
    value_clip: float,
    expectiles_H: Sequence[float] = (0.5,),
) -> torch.Tensor:
    """Squared error of each value, pessimistic about moves beyond the clip (PPO's reference code, `vf_loss`).

    |tau - 1(G < V)| max((V - G)^2, (clip(V, V_start - c, V_start + c) - G)^2)        0 where G is NaN

    With tau, one for each of a token's H values, V becomes that expectile of the returns; 1/2 is their mean.
    """
    known_N = ~returns_N.isnan()
    returns_N = returns_N.where(known_N, values_N.detach())
    clipped_N = start_N + (values_N - start_N).clamp(-value_clip, value_clip)
    errors_N = torch.maximum((values_N - returns_N).square(), (clipped_N - returns_N).square())
    tau_N = torch.tensor(expectiles_H, device=values_N.device).repeat(len(values_N) // len(expectiles_H))
    tilt_N = (tau_N - (returns_N < values_N).float()).abs()
    return (tilt_N * errors_N).where(known_N, 0.0)


class ForwardMetrics:
    """Sums over the trained tokens of this rank's forward passes; a token that several updates see counts each time."""

    def __init__(self, device: torch.device, *, estimator: Estimator) -> None:
        self._estimator = estimator
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._ratio_max = torch.zeros((), dtype=torch.float64, device=device)
        self._open = torch.zeros(len(_LOSSES), dtype=torch.float64, device=device)
        self._closed = torch.zeros_like(self._open)

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: TokenLoss, entropy_N: torch.Tensor) -> None:
        """Count one forward pass."""
        if not len(tokens.logprobs_N):
            return
        log_ratio_N = tokens.logprobs_N.detach() - tokens.behaviour_N
        ratio_N = log_ratio_N.exp()
        reference_kl = torch.zeros((), device=ratio_N.device)
        if tokens.reference_N is not None:
            reference_kl = kl_divergence(tokens.logprobs_N - tokens.reference_N, estimator=self._estimator).sum()
        parts = (
            ratio_N.sum(),
            loss.clipped_N.sum(),
            (ratio_N - 1.0 - log_ratio_N).sum(),  # K3 the other way round: tokens are the behaviour's
            entropy_N.sum(),
            torch.tensor(len(ratio_N), device=ratio_N.device),
            loss.weight_N.sum(),
            (loss.weight_N == 0).sum(),
            reference_kl,
        )
        self._sums += torch.stack([part.double() for part in parts])
        self._ratio_max = torch.maximum(self._ratio_max, ratio_N.max().double())

    @torch.no_grad()
    def add_losses(self, *, loss: torch.Tensor, value_loss: torch.Tensor) -> None:
        """Weighed sums of one forward pass."""
        self._open += torch.stack([loss.double(), value_loss.double()])

    def end_update(self, *, scale: float, critic_scale: float) -> None:
        """The losses so far were one update's."""
        scales = torch.tensor([scale, critic_scale], dtype=torch.float64, device=self._open.device)
        self._closed += self._open * scales
        self._open.zero_()

    def raw(self) -> list[float]:
        """The numbers that `forward_metrics` takes."""
        return [*self._sums.tolist(), *self._closed.tolist(), self._ratio_max.item()]


def forward_metrics(ranks: Sequence[Sequence[float]], *, updates: int, critic_updates: int) -> dict[str, float]:
    """The step's numbers from every rank's sums; losses are means over the updates.

    No mean of means. A ratio without tokens is 0 and `forward_tokens` says that nothing was measured. The key set is the same for
    every algorithm.
    """
    *columns, ratios = zip(*ranks, strict=True)
    sums = dict(zip((*_SUMS, *_LOSSES), map(sum, columns), strict=True))
    tokens = max(1.0, sums["tokens"])
    return {
        "loss": sums["loss"] / updates,
        "value_loss": sums["value_loss"] / critic_updates,
        "ratio_mean": sums["ratio"] / tokens,
        "ratio_max": max(ratios),
        "clip_fraction": sums["clipped"] / tokens,
        "behaviour_kl": sums["kl"] / tokens,
        "reference_kl": sums["reference_kl"] / tokens,
        "correction_weight_mean": sums["weight"] / tokens,
        "masked_fraction": sums["masked"] / tokens,
        "entropy": sums["entropy"] / tokens,
        "forward_tokens": sums["tokens"],
    }


_TOKEN_SUMS, _SEQUENCE_SUMS = 4, 2
"""Columns: tokens, |d|, K3, clipped tokens; then sequences, sequences outside the clip; then the largest |d|."""

DIFFS = ("train_infer_logprob_diff_mean", "train_infer_logprob_diff_max", "train_infer_logprob_diff_kl")
"""What is said of all samples of lag 0 together."""


class LogprobDiff:
    """Sums of the trainer's against the generators' log-probs, one row for each pair of pool and lag (`metrics/logprob_diff.py`).

    With d = log proximal(t) - log mu(t), where mu is what the generator said of the token when it drew it and proximal the trainer's own
    policy at the start of the step's updates (later updates move the policy, not this), over the tokens t:

        mean    sum |d| / tokens        max    max |d|        kl    sum (exp(d) - 1 - d) / tokens    (K3 of KL(mu || proximal))

    A token that several updates see counts each time.
    """

    def __init__(self, device: torch.device, *, pools: Sequence[str]) -> None:
        self._pools = pools
        self._rows = {at: row for row, at in enumerate(pool_lags(pools))}
        self._sums = torch.zeros(len(self._rows), _TOKEN_SUMS + _SEQUENCE_SUMS, dtype=torch.float64, device=device)
        self._maxima = torch.zeros(len(self._rows), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, tokens: TokenBatch, *, loss: TokenLoss, samples: Sequence[PackedSample]) -> None:
        """Count one forward pass of `samples`."""
        if not len(tokens.logprobs_N):
            return
        d_N = (tokens.proximal_N - tokens.behaviour_N).double()
        ones_N = torch.ones_like(d_N)
        rows_B = torch.tensor([self._row(sample) for sample in samples], device=d_N.device)
        rows_N = rows_B[tokens.sequences_N]
        columns = torch.stack([ones_N, d_N.abs(), torch.expm1(d_N) - d_N, loss.clipped_N.double()], dim=1)
        self._sums[:, :_TOKEN_SUMS].index_add_(0, rows_N, columns)
        self._maxima.scatter_reduce_(0, rows_N, d_N.abs(), "amax")
        counts_B = d_N.new_zeros(len(samples)).index_add(0, tokens.sequences_N, ones_N)
        outside_B = d_N.new_zeros(len(samples)).index_add(0, tokens.sequences_N, loss.outside_N.double())
        trained_B = counts_B > 0
        sequences = torch.stack([trained_B, trained_B & (outside_B == counts_B)], dim=1).double()
        self._sums[:, _TOKEN_SUMS:].index_add_(0, rows_B, sequences)

    def _row(self, sample: PackedSample) -> int:
        return self._rows[pool_lag(sample.generator_id, lag=sample.version_lag, pools=self._pools)]

    def raw(self) -> list[list[float]]:
        """The numbers that `logprob_diff_metrics` takes."""
        return [[*sums, largest] for sums, largest in zip(self._sums.tolist(), self._maxima.tolist(), strict=True)]


def logprob_diff_metrics(ranks: Sequence[Sequence[Sequence[float]]], *, pools: Sequence[str]) -> dict[str, float]:
    """The step's numbers from every rank's.

    By pool and lag, where there were tokens; and, always, the differences of all samples of lag 0 together, and the sequences of all lags.
    """
    rows = {at: _added(row) for at, *row in zip(pool_lags(pools), *ranks, strict=True)}
    newest = _measures(_added([row for at, row in rows.items() if at.lag == LAGS[0]]))
    found = {name: value for name, value in newest.items() if name in DIFFS}
    found[CLIPPED] = _measures(_added(list(rows.values())))[CLIPPED]
    for at, row in rows.items():
        if row[0]:
            found |= {key(name, at): value for name, value in _measures(row).items()}
    return found


def _added(rows: Sequence[Sequence[float]]) -> list[float]:
    """One row for several; the last column is a maximum."""
    *sums, maxima = zip(*rows, strict=True)
    return [*map(sum, sums), max(maxima)]


def _measures(row: Sequence[float]) -> dict[str, float]:
    """Of nothing: zeros."""
    tokens, diff, kl, clipped, sequences, outside, largest = row
    return {
        "train_infer_logprob_diff_mean": diff / max(1.0, tokens),
        "train_infer_logprob_diff_max": largest,
        "train_infer_logprob_diff_kl": kl / max(1.0, tokens),
        "train_infer_logprob_diff_tokens": tokens,
        "clip_fraction": clipped / max(1.0, tokens),
        "sequence_clip_fraction": outside / max(1.0, sequences),
    }
