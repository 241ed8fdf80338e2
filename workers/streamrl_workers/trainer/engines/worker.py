"""What every rank computes, in lockstep: forward and backward passes, sums, optimiser updates.

Owns: the models of this rank, their gradients and optimisers, the sums of a step. Does not own: which sample goes where
(`torch_engine.py`), processes and collectives (`ranks.py`), the layout of files (`torch_files.py`).

Each public method takes one payload and answers with one (`ranks.Payload`), and is called on every rank in the same
order. A rank without samples passes a dummy through the same models: what runs, runs everywhere.

Gradients are accumulated as sums of weighted token losses and scaled once at the update, so the cut into micro-batches
does not matter.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.algorithms.rule import Rule, TokenBatch
from streamrl_workers.trainer.engines import torch_files
from streamrl_workers.trainer.engines.critic import ValueModel, token_values, value_loss
from streamrl_workers.trainer.engines.forward import Forward, MicroBatch, make_batch
from streamrl_workers.trainer.engines.optimiser import Optimiser
from streamrl_workers.trainer.engines.packing import DUMMY, Prepared, Sample, Update
from streamrl_workers.trainer.engines.reference import Reference
from streamrl_workers.trainer.engines.sums import StepSums
from streamrl_workers.weights.hashing import TensorBytes

_CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a rank works on; the worker's own from now on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    algorithm: Rule
    reference: Reference | None = None  # where the rule has a `reference_kl`
    critic: ValueModel | None = None  # where the rule has a `critic`


class RankWorker:
    """One rank of the trainer."""

    def __init__(self, parts: Parts, *, spec: RLJobSpec) -> None:
        self._model = parts.model.eval()  # type: ignore[no-untyped-call] # no dropout: ratios compare log-probs of the same function
        self._tokenizer = parts.tokenizer
        self._rule = parts.algorithm
        self._reference = parts.reference
        self._critic = parts.critic
        self._precision = spec.trainer.precision
        self._temperature = spec.task.sampling.temperature
        self._device = next(parts.model.parameters()).device
        self._forward = Forward(parts.model, temperature=self._temperature)
        self._optimiser = Optimiser(parts.model, spec=spec.trainer, steps=spec.pipeline.steps)
        self._critic_optimiser = _critic_optimiser(parts, spec=spec)
        self.begin(None)

    def begin(self, payload: None) -> None:
        """A step: gradients and sums of zero."""
        del payload
        kl = self._rule.reference_kl
        self._sums = StepSums(self._device, estimator=kl.estimator if kl else "K3")
        self._zero()

    @torch.no_grad()
    def prepare(self, samples: Sequence[Sample]) -> list[Prepared]:
        """What is said of each sample before the step's updates: log-probs, the reference's, values."""
        batch = self._batch(samples)
        counts = [sample.trained for sample in samples]
        proximal = _rows(self._forward.logprobs(batch), counts=counts)
        reference_N = self._reference_logprobs(batch)
        values_N = None if self._critic is None else token_values(self._critic, batch)
        references = [None] * len(counts) if reference_N is None else _rows(reference_N, counts=counts)
        values = [None] * len(counts) if values_N is None else _rows(values_N, counts=counts)
        return [
            Prepared(proximal_N=p, reference_N=r, values_N=v)
            for p, r, v in zip(proximal, references, values, strict=True)
        ]

    def accumulate(self, samples: Sequence[Sample]) -> None:
        """One micro-step: forward and backward."""
        batch = self._batch(samples)
        logprobs_N, entropy_N = self._forward.logprobs_entropy(batch)
        tokens = TokenBatch(
            logprobs_N=logprobs_N,
            behaviour_N=batch.behaviour_N,
            proximal_N=logprobs_N.detach() if batch.proximal_N is None else batch.proximal_N,
            advantages_N=batch.advantages_N,
            sequences_N=batch.sequences_N,
            reference_N=self._reference_logprobs(batch) if self._rule.needs == "group" else batch.reference_N,
        )
        loss = self._rule.token_loss(tokens)
        total = (loss.loss_N * batch.weights_N).sum()
        errors = self._value_loss(batch)
        torch.autograd.backward([total] if errors is None else [total, errors])
        self._sums.add(tokens, loss=loss, entropy_N=entropy_N, fresh_N=batch.fresh_N)
        self._sums.add_losses(loss=total, value_loss=torch.zeros_like(total) if errors is None else errors)

    def update(self, update: Update) -> dict[str, float]:
        """Step the optimisers over the sums so far, and forget these."""
        self._sums.end_update(scale=update.scale, critic_scale=update.critic_scale)
        numbers = {"gradient_norm": 0.0, "learning_rate": 0.0, "refused_updates": 0.0, "critic_gradient_norm": 0.0}
        if update.policy:
            numbers |= self._optimiser.step(update.step, scale=update.scale)
        if self._critic_optimiser is not None:
            critic = self._critic_optimiser.step(update.step, scale=update.critic_scale)
            numbers["critic_gradient_norm"] = critic["gradient_norm"]
            numbers["refused_updates"] += critic["refused_updates"]
        return numbers

    def zero(self, payload: None) -> None:
        """Forget the gradients of an update that was made; another follows."""
        del payload
        self._zero()

    def measured(self, payload: None) -> list[float]:
        """The step's sums on this rank."""
        del payload
        return self._sums.raw()

    def tensors(self, payload: None) -> dict[str, TensorBytes]:
        """Copies of all tensors; where names share one storage (tied embeddings), the first name stands for both."""
        del payload
        return torch_files.tensors(self._model, precision=self._precision)

    def save(self, directory: str) -> None:
        """Models, optimisers, random state."""
        for path, model, optimiser in self._states(Path(directory)):
            path.mkdir(exist_ok=True)
            torch_files.save(path, model=model, optimiser=optimiser.adamw)

    def load(self, directory: str) -> None:
        """Go back to what was saved."""
        for path, model, optimiser in self._states(Path(directory)):
            torch_files.load(path, model=model, optimiser=optimiser.adamw)

    def export(self, directory: str) -> None:
        """As `from_pretrained` loads it."""
        torch_files.export(Path(directory), model=self._model, tokenizer=self._tokenizer, precision=self._precision)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of this rank as they are: sums before an update, scaled and clipped behind it. No call of the engine."""
        models = {"": self._model} if self._critic is None else {"": self._model, "critic.": self._critic}
        return {
            prefix + name: p.grad.clone()
            for prefix, model in models.items()
            for name, p in model.named_parameters()
            if p.grad is not None
        }

    def _batch(self, samples: Sequence[Sample]) -> MicroBatch:
        return make_batch(samples or [DUMMY], aggregation=self._rule.aggregation, device=self._device)

    def _zero(self) -> None:
        self._optimiser.zero()
        if self._critic_optimiser is not None:
            self._critic_optimiser.zero()

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with self._reference.initial() as model:
            return Forward(model, temperature=self._temperature).logprobs(batch)

    def _value_loss(self, batch: MicroBatch) -> torch.Tensor | None:
        if self._critic is None:
            return None
        assert self._rule.critic is not None, "a critic that the rule did not ask for"
        assert batch.values_N is not None, "samples that were not prepared"
        assert batch.returns_N is not None, "samples without estimates"
        values_N = token_values(self._critic, batch)
        clip = self._rule.critic.value_clip
        return value_loss(values_N, start_N=batch.values_N, returns_N=batch.returns_N, value_clip=clip).sum()

    def _states(self, directory: Path) -> Iterator[tuple[Path, torch.nn.Module, Optimiser]]:
        yield directory, self._model, self._optimiser
        if self._critic is not None and self._critic_optimiser is not None:
            yield directory / _CRITIC_FOLDER, self._critic, self._critic_optimiser


def _critic_optimiser(parts: Parts, *, spec: RLJobSpec) -> Optimiser | None:
    """As the policy's, with a learning rate of its own."""
    if parts.critic is None or parts.algorithm.critic is None:
        return None
    trainer = spec.trainer.model_copy(update={"learning_rate": parts.algorithm.critic.learning_rate})
    return Optimiser(parts.critic, spec=trainer, steps=spec.pipeline.steps)


def _rows(values_N: torch.Tensor, *, counts: Sequence[int]) -> list["array[float]"]:
    """The numbers of each sample."""
    flat, begin, rows = array("f", values_N.float().tolist()), 0, []
    for count in counts:
        rows.append(flat[begin : begin + count])
        begin += count
    return rows
