"""Rules that need whole groups: advantages when a group arrives, micro-steps as samples stream in, one update.

A group whose advantages are all zero has a gradient of exactly zero: it counts, but has no forward pass. Where the loss
holds a divergence it has a gradient, and gets its passes.
"""

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.trainer.algorithms.rule import GroupRule
from streamrl_workers.trainer.engines.flow import Counts, accumulate, merged, outcome_of, scale_of
from streamrl_workers.trainer.engines.packing import Pending, Sample, Update, make_sample
from streamrl_workers.trainer.engines.ranks import Ranks, everywhere
from streamrl_workers.trainer.tally import Tally, is_trained


class GroupFlow:
    """Trains samples as they come."""

    def __init__(self, rule: GroupRule, *, ranks: Ranks, spec: RLJobSpec) -> None:
        self._rule = rule
        self._ranks = ranks
        self._max_tokens = spec.task.sampling.max_tokens
        self._skips_equal = rule.reference_kl is None or rule.reference_kl.coefficient == 0
        self._pending = Pending(budget_tokens=spec.trainer.micro_batch_tokens, ranks=ranks.size)
        self.begin(0, attempt=0)

    def begin(self, step: int, *, attempt: int) -> None:
        """With nothing pending."""
        self._step, self._attempt = step, attempt
        self._skipped_tokens = 0
        self._pending.take_all()

    def add(self, group: pb.Group) -> None:
        """Form advantages; samples wait for a micro-step."""
        for sample in self._samples(group):
            self._pending.add(sample)

    def advance(self, *, idle: bool) -> bool:
        """Forward and backward over what waits."""
        batches = self._pending.take(idle=idle)
        accumulate(self._ranks, batches=batches)
        return bool(batches)

    def finish(self, tally: Tally) -> dict[str, float]:
        """The rest of the samples, then the update."""
        accumulate(self._ranks, batches=self._pending.take_all())
        counts = Counts(samples=tally.samples, sequences=tally.sequences, tokens=tally.tokens)
        scale = scale_of(self._rule.aggregation, counts=counts, max_tokens=self._max_tokens)
        update = Update(step=self._step, scale=scale, critic_scale=0.0, policy=True)
        numbers = merged([everywhere(self._ranks, "update", update)[0]])
        return numbers | {"skipped_tokens": float(self._skipped_tokens), "explained_variance": 0.0}

    def _samples(self, group: pb.Group) -> list[Sample]:
        """The samples of a group that need a forward pass."""
        advantages = self._rule.advantages([outcome_of(trajectory) for trajectory in group.trajectories])
        samples = [
            make_sample(trajectory, advantage=advantage, step=self._step, attempt=self._attempt)
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
            if advantage is not None and is_trained(trajectory)
        ]
        if not self._skips_equal or any(sample.advantages_N[0] for sample in samples):
            return samples
        self._skipped_tokens += sum(sample.trained for sample in samples)
        return []
