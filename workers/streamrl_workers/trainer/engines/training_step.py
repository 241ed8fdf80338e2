"""A training step as rank 0 runs it: groups in, micro-steps through all ranks, optimiser updates.

Owns: when samples are trained, what the algorithm is told of them, the scale of an update. Does not own: which samples go into one
forward pass (`packing.py`), passes and gradients (`worker.py`), the formulas (`algorithms/`).

- `GroupStep`, for algorithms that need groups: advantages when a group arrives, micro-steps as samples stream in, one update. A group
  whose advantages are all zero has a gradient of exactly zero: it counts, but has no forward pass. Where the loss holds a divergence
  or a teacher's log-probs it has a gradient, and gets its passes. Where the correction has a mask, samples are prepared as they stream in, as those of
  `BatchStep` are, and trained when the step is full.
- `BatchStep`, for those that need the batch: what the algorithm must know of a sample before the first update (its log-probs, the
  reference's, the critic's values) is formed without gradient while others are still generated; when the batch is full, epochs of
  mini-batches, an update each. Which sample is in which mini-batch follows from the job's seed, the step and the samples' names, not
  from the order in which they arrived.

A sample with several contexts is one sample here, and several sequences of a forward pass.
"""

import logging
import math
import random
import statistics
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.stream.segments import segments
from streamrl_workers.trainer.algorithms.algorithm import (
    Aggregation,
    Algorithm,
    BatchAlgorithm,
    GroupAlgorithm,
    ModelTurn,
    RewardedSample,
    TokenValues,
    TokenView,
)
from streamrl_workers.trainer.algorithms.corrections import BatchMask
from streamrl_workers.trainer.engines.packing import Layout, PackedSample, Pending, Update, pack, pack_sample
from streamrl_workers.trainer.engines.process_group import RankCalls, everywhere
from streamrl_workers.trainer.engines.step_metrics import StepMetrics, is_trained
from streamrl_workers.trainer.replay import REPLAYED

log = logging.getLogger(__name__)

_Contexts = list[PackedSample]
"""Of one sample, in their order."""
_Round = list[list[PackedSample]]
"""A micro-batch for each rank."""


class TrainingStep(ABC):
    """The order of a step's work; one step at a time."""

    def __init__(self, *, ranks: RankCalls, spec: RLJobSpec, layout: Layout) -> None:
        self._ranks, self._layout = ranks, layout
        self._seed = spec.seed
        self._max_tokens = spec.task.sampling.max_tokens
        self._budget_tokens = spec.trainer.micro_batch_tokens
        self._pending = Pending(budget_tokens=self._budget_tokens, layout=layout, ranks=ranks.size)
        self.begin(0, attempt=0)

    def begin(self, step: int, *, attempt: int) -> None:
        """Forget what an unfinished step had gathered."""
        self._step, self._attempt = step, attempt
        self.advantages: dict[int, list[float]] = {}
        """Of each group by sample: the mean over its tokens, NaN where it is not trained. Complete when the step is finished."""
        self._pending.take_all()

    def limit(self, tokens: Sequence[int | None]) -> None:
        """Let no pass have more tokens than the rank with the least room can hold; None: a rank without a limit."""
        room = min([self._budget_tokens, *(room for room in tokens if room is not None)])
        if room < self._pending.room_tokens:
            log.warning(
                "the memory holds passes of %d tokens instead of spec.trainer.microBatchTokens (%d)",
                room,
                self._budget_tokens,
            )
        self._pending.room_tokens = room

    @property
    def room_tokens(self) -> int:
        """Return the tokens that the memory lets passes have; 0: as many as the job says."""
        room = self._pending.room_tokens
        return room if room < self._budget_tokens else 0

    @abstractmethod
    def add(self, group: pb.Group) -> None:
        """Take a group."""

    def advance(self, *, idle: bool) -> bool:
        """Do one micro-step if enough waits."""
        rounds = self._pending.take(idle=idle)
        self._pass(rounds)
        return bool(rounds)

    @abstractmethod
    def _pass(self, rounds: Sequence[_Round]) -> None:
        """What a micro-step does with samples that have waited."""

    @abstractmethod
    def finish(self, metrics: StepMetrics) -> dict[str, float]:
        """Do the rest and update; the numbers that only this knows."""

    def held_out_loss(self, samples: Sequence[pb.Sample]) -> float:
        """Mean cross-entropy over the tokens of these, each times its sample's weight, in nats, under the weights as they are."""
        packed = [
            part
            for sample in samples
            for part in pack_sample(sample, step=0, attempt=0, advantage=rewarded(sample).weight)
        ]
        return -statistics.fmean(
            weight * number
            for sample in self._prepared(self._packed(packed))
            for weight, number in zip(sample.advantages_N, sample.proximal_N or (), strict=True)
        )

    def _accumulate(self, rounds: Sequence[_Round], *, method: str = "accumulate") -> None:
        """Micro-steps over all rounds."""
        for payloads in rounds:
            self._ranks.call(method, payloads)

    def _prepared(self, rounds: Sequence[_Round]) -> Iterator[PackedSample]:
        """The samples with what is said of them before the step's updates: forward passes without gradient."""
        for payloads in rounds:
            for samples, answers in zip(payloads, self._ranks.call("prepare", payloads), strict=True):
                for sample, prepared in zip(samples, answers if samples else [], strict=True):  # a dummy's is nobody's
                    yield replace(sample, **prepared)

    def _packed(self, samples: Sequence[PackedSample]) -> list[_Round]:
        return pack(samples, budget_tokens=self._pending.room_tokens, layout=self._layout, ranks=self._ranks.size)

    def _update(self, update: Update) -> dict[str, float]:
        answer: dict[str, float] = everywhere(self._ranks, "update", update)[0]
        return answer

    def _scale(self, aggregation: Aggregation, *, samples: int, sequences: int, tokens: int) -> float:
        """What turns sums of weighted token losses into the loss of an update; `samples` are with those that are masked."""
        divisors = {
            "SequenceMean": sequences,
            "TokenMean": tokens,
            "SequenceSum": sequences,
            "FixedLength": samples * self._max_tokens,
        }
        return 1.0 / max(1, divisors[aggregation])


class GroupStep(TrainingStep):
    """Trains samples as they come."""

    def __init__(self, algorithm: GroupAlgorithm, *, ranks: RankCalls, spec: RLJobSpec, layout: Layout) -> None:
        super().__init__(ranks=ranks, spec=spec, layout=layout)
        self._algorithm = algorithm
        kl = algorithm.reference_kl
        self._skips_equal = algorithm.skips_equal and (kl is None or kl.coefficient == 0)

    def begin(self, step: int, *, attempt: int) -> None:
        """With nothing pending."""
        super().begin(step, attempt=attempt)
        self._skipped_tokens = 0
        self._waiting: list[PackedSample] = []  # for the mask: prepared

    def add(self, group: pb.Group) -> None:
        """Form advantages; samples wait for a micro-step."""
        advantages = self._algorithm.group_advantages([rewarded(sample) for sample in group.samples])
        self.advantages[group.group_id] = [math.nan if value is None else value for value in advantages]
        packed = [
            context
            for sample, advantage in zip(group.samples, advantages, strict=True)
            if advantage is not None and is_trained(sample)
            for context in pack_sample(sample, advantage=advantage, step=self._step, attempt=self._attempt)
        ]
        if self._skips_equal and not any(sample.advantages_N[0] for sample in packed):
            self._skipped_tokens += sum(sample.trained for sample in packed)
            return
        for waiting in packed:
            self._pending.add(waiting)

    def _pass(self, rounds: Sequence[_Round]) -> None:
        if self._algorithm.mask is None:
            self._accumulate(rounds)
        else:
            self._waiting += self._prepared(rounds)

    def finish(self, metrics: StepMetrics) -> dict[str, float]:
        """The rest of the samples, then the update."""
        self._pass(self._pending.take_all())
        self._accumulate(self._packed(masked(self._waiting, mask=self._algorithm.mask)))
        scale = self._scale(
            self._algorithm.aggregation, samples=metrics.samples, sequences=metrics.sequences, tokens=metrics.tokens
        )
        numbers = self._update(Update(step=self._step, scale=scale, critic_scale=0.0, policy=True))
        return _merged([numbers]) | {"skipped_tokens": float(self._skipped_tokens), "explained_variance": 0.0}


class BatchStep(TrainingStep):
    """Prepares samples as they come, trains them together."""

    def __init__(self, algorithm: BatchAlgorithm, *, ranks: RankCalls, spec: RLJobSpec, layout: Layout) -> None:
        super().__init__(ranks=ranks, spec=spec, layout=layout)
        self._algorithm = algorithm
        several = algorithm.epochs * algorithm.mini_batches > 1
        wanted = (algorithm.reference_kl, algorithm.critic, algorithm.mask)
        self._prepares = several or any(one is not None for one in wanted)

    def begin(self, step: int, *, attempt: int) -> None:
        """With an empty batch."""
        super().begin(step, attempt=attempt)
        self._batch: dict[tuple[int, int], tuple[pb.Sample, dict[int, PackedSample]]] = {}
        """Each sample and its contexts."""

    def add(self, group: pb.Group) -> None:
        """Samples wait for their preparation."""
        self.advantages[group.group_id] = [math.nan] * len(group.samples)
        for sample in filter(is_trained, group.samples):
            packed = pack_sample(sample, step=self._step, attempt=self._attempt)
            self._batch[group.group_id, sample.sample_index] = sample, {part.context: part for part in packed}
            if self._prepares:
                for part in packed:
                    self._pending.add(part)

    def finish(self, metrics: StepMetrics) -> dict[str, float]:
        """Prepare the rest, form advantages, and go through the epochs."""
        del metrics
        self._pass(self._pending.take_all())
        samples = self._valued()
        updates = [self._trained(part, first=number == 0) for number, part in enumerate(self._parts(samples))]
        return _merged(updates) | {"skipped_tokens": 0.0, "explained_variance": _explained_variance(_flat(samples))}

    def _valued(self) -> list[_Contexts]:
        """The samples with advantages, what the critic is to learn, and the mask."""
        batch = [(sample, list(contexts.values())) for _, (sample, contexts) in sorted(self._batch.items())]
        values = self._algorithm.values([_view(*entry) for entry in batch]) if batch else []
        for (sample, _), found in zip(batch, values, strict=True):
            self.advantages[sample.group_id][sample.sample_index] = statistics.fmean(found.advantages_N)
        samples = [_with(contexts, values=found) for (_, contexts), found in zip(batch, values, strict=True)]
        kept = iter(masked(_flat(samples), mask=self._algorithm.mask))
        return [[next(kept) for _ in contexts] for contexts in samples]

    def _pass(self, rounds: Sequence[_Round]) -> None:
        """Forward passes without gradient over all rounds."""
        for sample in self._prepared(rounds):
            _, contexts = self._batch[sample.group_id, sample.index]
            contexts[sample.context] = sample

    def _parts(self, samples: Sequence[_Contexts]) -> Iterator[list[_Contexts]]:
        """The mini-batches of all epochs; without samples one empty one, for the optimiser's momentum."""
        count = max(1, min(self._algorithm.mini_batches, len(samples)))
        for epoch in range(self._algorithm.epochs):
            order = list(samples)
            random.Random(f"{self._seed}/{self._step}/{epoch}").shuffle(order)
            for part in range(count):
                yield order[part * len(order) // count : (part + 1) * len(order) // count]

    def _trained(
        self, samples: Sequence[_Contexts], *, first: bool, policy: bool = True, critic: bool = True
    ) -> dict[str, float]:
        """One mini-batch and its update; of the policy, the critic, or both."""
        if not first:
            everywhere(self._ranks, "zero")
        contexts, count = _flat(samples), len(samples)
        method = "accumulate" if policy and critic else "accumulate_policy" if policy else "accumulate_values"
        self._accumulate(self._packed(contexts), method=method)
        tokens = sum(context.trained for context in contexts)
        targets = sum(not math.isnan(target) for context in contexts for target in context.returns_N or ())
        warmed_up = self._algorithm.critic is None or self._step >= self._algorithm.critic.warm_up_steps
        return self._update(
            Update(
                step=self._step,
                scale=self._scale(self._algorithm.aggregation, samples=count, sequences=count, tokens=tokens),
                critic_scale=1.0 / max(1, targets),
                policy=policy and warmed_up,
                critic=critic,
            )
        )


class CriticFirstStep(BatchStep):
    """The critic learns from all samples, then the policy is updated once, from the step's own, by what the critic has learnt."""

    def finish(self, metrics: StepMetrics) -> dict[str, float]:
        """Prepare the rest, go through the critic's epochs, prepare the step's own again, and update the policy."""
        del metrics
        self._pass(self._pending.take_all())
        samples = self._valued()
        told = _explained_variance(_flat(samples))
        taught = [
            self._trained(part, first=number == 0, policy=False) for number, part in enumerate(self._parts(samples))
        ]
        own = [contexts for contexts in samples if not _is_replayed(contexts[0])]
        self._pass(self._packed(_flat(own)))
        own = [contexts for contexts in self._valued() if not _is_replayed(contexts[0])]
        moved = self._trained(own, first=False, critic=False)
        learnt = _merged(taught)
        return _merged([moved]) | {
            "critic_gradient_norm": learnt["critic_gradient_norm"],
            "critic_updates": learnt["updates"],
            "skipped_nonfinite_steps": moved["skipped_nonfinite_steps"] + learnt["skipped_nonfinite_steps"],
            "skipped_tokens": 0.0,
            "explained_variance": told,
        }


def create_training_step(algorithm: Algorithm, *, ranks: RankCalls, spec: RLJobSpec, layout: Layout) -> TrainingStep:
    """As the algorithm needs it."""
    if isinstance(algorithm, BatchAlgorithm):
        return (CriticFirstStep if algorithm.critic_first else BatchStep)(
            algorithm, ranks=ranks, spec=spec, layout=layout
        )
    assert isinstance(algorithm, GroupAlgorithm), f"{type(algorithm).__name__} needs neither groups nor batches"
    return GroupStep(algorithm, ranks=ranks, spec=spec, layout=layout)


def rewarded(sample: pb.Sample) -> RewardedSample:
    """What an algorithm of groups sees of a sample."""
    return RewardedSample(
        reward=sample.reward if sample.HasField("reward") else None,
        turns=_turns(sample),
        truncated=sample.finish_reason == "length",
        weight=sample.weight if sample.HasField("weight") else 1.0,
        parts=dict(sample.reward_parts),
    )


def _view(sample: pb.Sample, contexts: _Contexts) -> TokenView:
    """What an algorithm of batches sees of a sample: the tokens of its contexts, one behind the other."""
    return TokenView(
        reward=sample.reward,
        turns=_turns(sample),
        group_id=sample.group_id,
        proximal_N=_joined([context.proximal_N for context in contexts]),
        reference_N=_joined([context.reference_N for context in contexts]),
        values_N=_joined([context.values_N for context in contexts]),
        target_values_N=_joined([context.target_values_N for context in contexts]),
        replayed=_is_replayed(contexts[0]),
        resampled=sample.resampled,
    )


def _joined(parts: Sequence["array[float] | None"]) -> list[float] | None:
    known = [part for part in parts if part is not None]
    return [number for part in known for number in part] if known else None


def _turns(sample: pb.Sample) -> tuple[ModelTurn, ...]:
    """What the model drew, turn by turn."""
    return tuple(
        ModelTurn(tokens=segment.tokens, reward=segment.reward if segment.HasField("reward") else None)
        for segment in segments(sample)
        if not segment.observation
    )


def masked(samples: Sequence[PackedSample], *, mask: BatchMask | None) -> list[PackedSample]:
    """The step's samples, each told which of its tokens the mask keeps; without a mask as they are."""
    if mask is None or not samples:
        return list(samples)
    log_ratio_N = [p - mu for s in samples for p, mu in zip(s.proximal_N or (), s.behaviour_N, strict=True)]
    kept_N = iter(mask(torch.tensor(log_ratio_N, dtype=torch.float64)).tolist())
    return [replace(s, kept_N=array("f", islice(kept_N, s.trained))) for s in samples]


def _is_replayed(sample: PackedSample) -> bool:
    return sample.group_id >= REPLAYED


def _with(contexts: _Contexts, *, values: TokenValues) -> _Contexts:
    """Each context with its tokens' part of the sample's values."""
    found, begin = [], 0
    each = len(values.returns_N or ()) // max(1, len(values.advantages_N))
    for context in contexts:
        end = begin + context.trained
        returns = None if values.returns_N is None else array("d", values.returns_N[begin * each : end * each])
        found.append(replace(context, advantages_N=array("d", values.advantages_N[begin:end]), returns_N=returns))
        begin = end
    return found


def _flat(samples: Sequence[_Contexts]) -> list[PackedSample]:
    return [context for contexts in samples for context in contexts]


def _merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """What a step says of its updates: mean norms, all that were skipped, the last learning rate."""
    means = {key: sum(update[key] for update in updates) / len(updates) for key in updates[0]}
    return means | {
        "learning_rate": updates[-1]["learning_rate"],
        "skipped_nonfinite_steps": sum(update["skipped_nonfinite_steps"] for update in updates),
        "updates": float(len(updates)),
    }


def _explained_variance(samples: Sequence[PackedSample]) -> float:
    """1 - Var(returns - values) / Var(returns) over what the critic is to learn; 0 without a critic or without variance."""
    pairs = [
        (target, value)
        for sample in samples
        if sample.returns_N is not None
        for target, value in zip(sample.returns_N, sample.values_N or (), strict=True)
        if not math.isnan(target)
    ]
    returns = [target for target, _ in pairs]
    if not returns or min(returns) == max(returns):
        return 0.0
    errors = [target - value for target, value in pairs]
    return 1.0 - statistics.pvariance(errors) / statistics.pvariance(returns)
