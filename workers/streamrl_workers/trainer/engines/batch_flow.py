"""Rules that need the whole batch: preparation as samples stream in, then epochs of mini-batches, an update each.

What the rule must know of a sample before the first update (its log-probs, the reference's, the critic's values) is
formed without gradient while others are still generated; only the updates wait for the full batch.

Invariant: which sample is in which mini-batch follows from the job's seed, the step and the samples' names, not from the
order in which they arrived.
"""

import random
import statistics
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.algorithms.rule import BatchRule, Estimate, Track, Turn
from streamrl_workers.trainer.engines.flow import Counts, accumulate, merged, prepare, scale_of, turns_of
from streamrl_workers.trainer.engines.packing import Pending, Sample, Update, deal, make_sample
from streamrl_workers.trainer.engines.ranks import Ranks, everywhere
from streamrl_workers.trainer.tally import Tally, is_trained


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A sample of the batch, and what the rule is told of it."""

    sample: Sample
    reward: float
    turns: tuple[Turn, ...]


class BatchFlow:
    """Prepares samples as they come, trains them together."""

    def __init__(self, rule: BatchRule, *, ranks: Ranks, spec: RLJobSpec) -> None:
        self._rule = rule
        self._ranks = ranks
        self._seed = spec.seed
        self._max_tokens = spec.task.sampling.max_tokens
        self._budget_tokens = spec.trainer.micro_batch_tokens
        several = rule.epochs * rule.mini_batches > 1
        self._prepares = several or rule.reference_kl is not None or rule.critic is not None
        self._pending = Pending(budget_tokens=self._budget_tokens, ranks=ranks.size)
        self.begin(0, attempt=0)

    def begin(self, step: int, *, attempt: int) -> None:
        """With an empty batch."""
        self._step, self._attempt = step, attempt
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._pending.take_all()

    def add(self, group: pb.Group) -> None:
        """Samples wait for their preparation."""
        for trajectory in filter(is_trained, group.trajectories):
            sample = make_sample(trajectory, step=self._step, attempt=self._attempt)
            entry = _Entry(sample=sample, reward=trajectory.reward, turns=turns_of(trajectory))
            self._entries[sample.group_id, sample.index] = entry
            if self._prepares:
                self._pending.add(sample)

    def advance(self, *, idle: bool) -> bool:
        """Prepare what waits."""
        batches = self._pending.take(idle=idle)
        self._prepare(batches)
        return bool(batches)

    def finish(self, tally: Tally) -> dict[str, float]:
        """Prepare the rest, form advantages, and go through the epochs."""
        del tally
        self._prepare(self._pending.take_all())
        entries = [self._entries[name] for name in sorted(self._entries)]
        estimates = self._rule.estimates([_track(entry) for entry in entries]) if entries else []
        samples = [_with(e.sample, estimate=estimate) for e, estimate in zip(entries, estimates, strict=True)]
        updates = [self._update(part, first=number == 0) for number, part in enumerate(self._parts(samples))]
        return merged(updates) | {"skipped_tokens": 0.0, "explained_variance": _explained_variance(samples)}

    def _prepare(self, batches: Sequence[list[Sample]]) -> None:
        for sample, prepared in prepare(self._ranks, batches=batches):
            name = sample.group_id, sample.index
            ready = replace(
                sample,
                proximal_N=prepared.proximal_N,
                reference_N=prepared.reference_N,
                values_N=prepared.values_N,
            )
            self._entries[name] = replace(self._entries[name], sample=ready)

    def _parts(self, samples: Sequence[Sample]) -> Iterator[list[Sample]]:
        """The mini-batches of all epochs; without samples one empty one, for the optimiser's momentum."""
        count = max(1, min(self._rule.mini_batches, len(samples)))
        for epoch in range(self._rule.epochs):
            order = list(samples)
            random.Random(f"{self._seed}/{self._step}/{epoch}").shuffle(order)
            for part in range(count):
                yield order[part * len(order) // count : (part + 1) * len(order) // count]

    def _update(self, samples: list[Sample], *, first: bool) -> dict[str, float]:
        if not first:
            everywhere(self._ranks, "zero")
        accumulate(self._ranks, batches=deal(samples, budget_tokens=self._budget_tokens, ranks=self._ranks.size))
        tokens = sum(sample.trained for sample in samples)
        counts = Counts(samples=len(samples), sequences=len(samples), tokens=tokens)
        critic = self._rule.critic
        update = Update(
            step=self._step,
            scale=scale_of(self._rule.aggregation, counts=counts, max_tokens=self._max_tokens),
            critic_scale=scale_of("TokenMean", counts=counts, max_tokens=self._max_tokens),
            policy=critic is None or self._step >= critic.warm_up_steps,
        )
        answer: dict[str, float] = everywhere(self._ranks, "update", update)[0]
        return answer


def _track(entry: _Entry) -> Track:
    return Track(
        reward=entry.reward,
        turns=entry.turns,
        proximal_N=entry.sample.proximal_N,
        reference_N=entry.sample.reference_N,
        values_N=entry.sample.values_N,
    )


def _with(sample: Sample, *, estimate: Estimate) -> Sample:
    returns = None if estimate.returns_N is None else array("d", estimate.returns_N)
    return replace(sample, advantages_N=array("d", estimate.advantages_N), returns_N=returns)


def _explained_variance(samples: Sequence[Sample]) -> float:
    """1 - Var(returns - values) / Var(returns) over the tokens of the batch; 0 without a critic or without variance."""
    returns = [number for sample in samples for number in sample.returns_N or ()]
    values = [number for sample in samples if sample.returns_N is not None for number in sample.values_N or ()]
    if not returns or min(returns) == max(returns):
        return 0.0
    errors = [target - value for target, value in zip(returns, values, strict=True)]
    return 1.0 - statistics.pvariance(errors) / statistics.pvariance(returns)
