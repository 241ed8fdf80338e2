"""What can be said of a step's groups without a model: counts, rewards, lengths, staleness; which tokens the model drew.

Owns: sums and counts (a mean is formed once, at the end). Does not own: reading segments (`stream/segments.py`), anything that
needs log-probs, losses. No torch. Tokens are those that the model drew: what it read in between is not counted. The key set is
stable, zeros included.
"""

from bisect import bisect_left
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.segments import trained_places, trained_tokens


@dataclass(slots=True, kw_only=True)
class StepMetrics:
    """Sums over the groups of one step."""

    step: int
    groups: int = 0
    zero_variance_groups: int = 0  # all known rewards equal: nothing to learn
    samples: int = 0
    masked_samples: int = 0  # no reward, or no token
    contexts: int = 0  # of samples, beyond their first
    sequences: int = 0  # samples that are not masked
    tokens: int = 0  # that the model drew, of these
    rewarded: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    stale_token_steps: int = 0
    staleness_max: int = 0  # steps, of any first token

    def add(self, group: pb.Group) -> None:
        """Count one group."""
        self.groups += 1
        rewards = [t.reward for t in group.samples if t.HasField("reward")]
        self.zero_variance_groups += len(set(rewards)) <= 1 and not any(t.resampled for t in group.samples)
        self.rewarded += len(rewards)
        self.reward_sum += sum(rewards)
        self.reward_square_sum += sum(reward * reward for reward in rewards)
        for sample in group.samples:
            self._add_sample(sample)

    def _add_sample(self, sample: pb.Sample) -> None:
        self.samples += 1
        self.contexts += sum(segment.context for segment in sample.segments)
        if not is_trained(sample):
            self.masked_samples += 1
            return
        self.sequences += 1
        self.tokens += trained_tokens(sample)
        spans = trained_spans(sample)
        self.stale_token_steps += sum(span.tokens * max(0, self.step - span.step) for span in spans)
        self.staleness_max = max(self.staleness_max, *[self.step - span.step for span in spans][:1], 0)

    def metrics(self) -> dict[str, float]:
        """The step's numbers."""
        mean = _ratio(self.reward_sum, self.rewarded)
        variance = max(0.0, _ratio(self.reward_square_sum, self.rewarded) - mean * mean)
        return {
            "groups": float(self.groups),
            "zero_variance_groups": float(self.zero_variance_groups),
            "samples": float(self.samples),
            "masked_samples": float(self.masked_samples),
            "contexts": float(self.contexts),
            "tokens": float(self.tokens),
            "completion_tokens_mean": _ratio(self.tokens, self.sequences),
            "reward_mean": mean,
            "reward_std": variance**0.5,
            "staleness_mean": _ratio(self.stale_token_steps, self.tokens),
            "staleness_max": float(self.staleness_max),
        }


def is_trained(sample: pb.Sample) -> bool:
    """Whether a sample takes part in the loss: it has a reward, or needs none, and at least one token that the model drew."""
    return (sample.HasField("reward") or sample.resampled) and trained_tokens(sample) > 0


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0


def trained_spans(sample: pb.Sample) -> list[pb.VersionSpan]:
    """The version spans, with their tokens counted without observations."""
    if not sample.segments:
        return list(sample.spans)
    places, begin, found = trained_places(sample), 0, []
    for span in sample.spans:
        end = begin + span.tokens
        tokens = bisect_left(places, end) - bisect_left(places, begin)
        found.append(pb.VersionSpan(tokens=tokens, step=span.step, attempt=span.attempt))
        begin = end
    return [span for span in found if span.tokens]


def version_lag(sample: pb.Sample, *, step: int, attempt: int) -> int:
    """How many steps the weights of its oldest token are behind those that `step` of `attempt` begins with; 0: all tokens are of these.

    Weights of an earlier attempt count as at least one step behind, whatever their number: the run went back since.
    """
    return max(
        (max(step - span.step, int((span.attempt, span.step) != (attempt, step))) for span in trained_spans(sample)),
        default=0,
    )
