"""What the flows share: how a step's samples go through the ranks.

Owns: the `Flow` protocol, rounds of micro-steps, the scale of an update, merging of what updates answer. Does not own:
when samples are trained (`group_flow.py`: as they stream in; `batch_flow.py`: when the batch is full).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.trainer.algorithms.rule import Aggregation, Outcome, Turn
from streamrl_workers.trainer.engines.packing import Prepared, Sample, rounds
from streamrl_workers.trainer.engines.ranks import Ranks
from streamrl_workers.trainer.tally import Tally
from streamrl_workers.trainer.turns import segments


class Flow(Protocol):
    """The order of a step's work; one step at a time."""

    def begin(self, step: int, *, attempt: int) -> None:
        """Forget what an unfinished step had gathered."""

    def add(self, group: pb.Group) -> None:
        """Take a group."""

    def advance(self, *, idle: bool) -> bool:
        """Do one micro-step if enough waits."""

    def finish(self, tally: Tally) -> dict[str, float]:
        """Do the rest and update; the numbers that only the flow knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What an update learns from."""

    samples: int  # with those that are masked
    sequences: int
    tokens: int


def scale_of(aggregation: Aggregation, *, counts: Counts, max_tokens: int) -> float:
    """What turns sums of weighted token losses into the loss of an update."""
    divisors = {
        "SequenceMean": counts.sequences,
        "TokenMean": counts.tokens,
        "SequenceSum": counts.sequences,
        "FixedLength": counts.samples * max_tokens,
    }
    return 1.0 / max(1, divisors[aggregation])


def accumulate(ranks: Ranks, *, batches: Sequence[list[Sample]]) -> None:
    """Micro-steps over all batches."""
    for payloads in rounds(batches, ranks=ranks.size):
        ranks.call("accumulate", payloads)


def prepare(ranks: Ranks, *, batches: Sequence[list[Sample]]) -> list[tuple[Sample, Prepared]]:
    """Forward passes without gradient over all batches."""
    answers: list[tuple[Sample, Prepared]] = []
    for payloads in rounds(batches, ranks=ranks.size):
        for samples, prepared in zip(payloads, ranks.call("prepare", payloads), strict=True):
            answers += zip(samples, prepared if samples else [], strict=True)  # a dummy's answer is nobody's
    return answers


def merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """What a step says of its updates: mean norms, all refusals, the last learning rate."""
    means = {key: sum(update[key] for update in updates) / len(updates) for key in updates[0]}
    return means | {
        "learning_rate": updates[-1]["learning_rate"],
        "refused_updates": sum(update["refused_updates"] for update in updates),
        "updates": float(len(updates)),
    }


def turns_of(trajectory: pb.Trajectory) -> tuple[Turn, ...]:
    """What the model drew, turn by turn."""
    return tuple(
        Turn(tokens=segment.tokens, reward=segment.reward if segment.HasField("reward") else None)
        for segment in segments(trajectory)
        if not segment.observation
    )


def outcome_of(trajectory: pb.Trajectory) -> Outcome:
    """What a group rule sees of a sample."""
    return Outcome(
        reward=trajectory.reward if trajectory.HasField("reward") else None,
        turns=turns_of(trajectory),
        truncated=trajectory.finish_reason == "length",
    )
