"""The trainer engine with torch: streamed micro-steps, one optimiser step.

Owns: the model, its gradients, the sums of a step. Does not own: reading and writing files (`torch_files.py`), which
samples go together (`packing.py`), the loss (`algorithms/`).

Gradients are accumulated as sums of weighted token losses (weight 1/len of its sequence with SequenceMean, 1 with
TokenMean) and scaled once at the end (1/sequences or 1/tokens of the step), so the cut into micro-batches does not
matter. A group whose advantages are all zero has a gradient of exactly zero: it counts, but has no forward pass.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.algorithms.rule import Algorithm, TokenBatch
from streamrl_workers.trainer.engines import torch_files
from streamrl_workers.trainer.engines.forward import Forward, make_batch
from streamrl_workers.trainer.engines.optimiser import Optimiser
from streamrl_workers.trainer.engines.packing import Pending, Sample, make_sample
from streamrl_workers.trainer.engines.sums import StepSums
from streamrl_workers.trainer.tally import Tally, is_trained
from streamrl_workers.weights.hashing import TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the engine works on; the engine's own from now on."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    algorithm: Algorithm


class TorchEngine:
    """Trains a causal language model."""

    def __init__(self, parts: Parts, *, spec: RLJobSpec) -> None:
        self._model = parts.model.eval()  # type: ignore[no-untyped-call] # no dropout: ratios compare log-probs of the same function
        self._tokenizer = parts.tokenizer
        self._algorithm = parts.algorithm
        self._device = next(parts.model.parameters()).device
        self._forward = Forward(parts.model, temperature=spec.task.sampling.temperature)
        self._optimiser = Optimiser(parts.model, spec=spec.trainer, steps=spec.pipeline.steps)
        self._pending = Pending(budget_tokens=spec.trainer.micro_batch_tokens)
        self.begin_step(0, attempt=0)

    def begin_step(self, step: int, *, attempt: int) -> None:
        """Begin with gradients and sums of zero."""
        self._step, self._attempt = step, attempt
        self._tally = Tally(step=step)
        self._sums = StepSums(self._device)
        self._skipped_tokens = 0
        self._pending.take_all()
        self._optimiser.zero()

    def add(self, groups: Sequence[pb.Group]) -> None:
        """Form advantages; samples wait for a micro-step."""
        for group in groups:
            self._tally.add(group)
            for sample in self._samples(group):
                self._pending.add(sample)

    def advance(self, *, idle: bool) -> bool:
        """One micro-step: forward and backward over what waits."""
        batches = self._pending.take(idle=idle)
        self._accumulate(batches)
        return bool(batches)

    def finish_step(self) -> dict[str, float]:
        """The rest of the samples, then the optimiser."""
        self._accumulate(self._pending.take_all())
        count = self._tally.sequences if self._algorithm.aggregation == "SequenceMean" else self._tally.tokens
        scale = 1.0 / max(1, count)
        metrics = self._tally.metrics() | self._sums.metrics(scale=scale)
        metrics["skipped_tokens"] = float(self._skipped_tokens)
        return metrics | self._optimiser.step(self._step, scale=scale)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient sums of the step so far, unscaled and unclipped."""
        return {name: p.grad.clone() for name, p in self._model.named_parameters() if p.grad is not None}

    def tensors(self) -> dict[str, TensorBytes]:
        """Copies of all tensors; where names share one storage (tied embeddings), the first name stands for both."""
        return torch_files.tensors(self._model)

    def save(self, directory: Path) -> None:
        """Model, optimiser, random state."""
        torch_files.save(directory, model=self._model, optimiser=self._optimiser.adamw)

    def load(self, directory: Path) -> None:
        """Go back to what was saved."""
        torch_files.load(directory, model=self._model, optimiser=self._optimiser.adamw)

    def export(self, directory: Path) -> None:
        """As `from_pretrained` loads it."""
        try:
            self._model.save_pretrained(directory)
            self._tokenizer.save_pretrained(directory)
        except SafetensorError as error:  # how a full disk shows
            raise OSError(errno.EIO, str(error)) from error

    def _samples(self, group: pb.Group) -> list[Sample]:
        """The samples of a group that need a forward pass."""
        rewards = [t.reward if t.HasField("reward") else None for t in group.trajectories]
        advantages = self._algorithm.advantages(rewards)
        trained = [
            (trajectory, advantage)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
            if advantage is not None and is_trained(trajectory)
        ]
        samples = [
            make_sample(trajectory, advantage=advantage, step=self._step, attempt=self._attempt)
            for trajectory, advantage in trained
        ]
        if any(sample.advantage for sample in samples):
            return samples
        self._skipped_tokens += sum(sample.completion_tokens for sample in samples)
        return []

    def _accumulate(self, batches: Sequence[Sequence[Sample]]) -> None:
        for samples in batches:
            batch = make_batch(samples, aggregation=self._algorithm.aggregation, device=self._device)
            logprobs_N, entropy_N = self._forward.logprobs(batch)
            loss = self._algorithm.token_loss(
                TokenBatch(logprobs_N=logprobs_N, behaviour_N=batch.behaviour_N, advantages_N=batch.advantages_N)
            )
            (loss.loss_N * batch.weights_N).sum().backward()  # type: ignore[no-untyped-call] # torch's
            self._sums.add(batch, logprobs_N=logprobs_N, entropy_N=entropy_N, loss=loss)
