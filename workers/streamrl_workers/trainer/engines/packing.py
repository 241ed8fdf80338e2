"""Which samples go into one forward pass. Pure; no torch.

Samples are cut into right-padded batches of alike lengths (docs/decisions/0004-micro-batches.md).

Invariants: `cut` puts every sample into exactly one batch; a batch's padded tokens are within the budget, except
that a sample longer than the budget goes alone.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.trainer.turns import trained_places, trained_spans

PADDING_TOKENS = 256
"""A batch is closed before its padding exceeds this: about what one more forward pass costs (measured, decision 0004)."""

IDLE_SHARE = 4
"""With nothing else to do, a micro-step starts at this fraction (1/4) of the token budget: smaller ones use the machine badly."""

_TRIED_ROUNDS = 3
"""Above one rank so many numbers of rounds are tried: one round more can be shorter in all than one that is badly filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory that takes part in the loss; N tokens of it were drawn by the model, only these are trained."""

    group_id: int
    index: int  # in its group
    tokens: "array[int]"  # prompt, turns and observations, up to the last trained one
    places_N: "array[int]"  # where the trained tokens are in `tokens`, ascending, none at 0
    behaviour_N: "array[float]"  # log-prob when the token was drawn
    advantages_N: "array[float]"
    fresh_N: "array[int]"  # 1: drawn under the very weights that are trained now
    proximal_N: "array[float] | None" = None  # log-probs under the weights of the batch's start
    reference_N: "array[float] | None" = None  # log-probs under the initial weights
    values_N: "array[float] | None" = None  # the critic's at the batch's start
    returns_N: "array[float] | None" = None  # what the critic is to learn

    @property
    def inputs(self) -> int:
        """Tokens that a forward pass sees: all but the last, which predicts nothing."""
        return len(self.tokens) - 1

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return len(self.places_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What forward passes without gradient say of one sample before its step's updates; None: not asked for."""

    proximal_N: "array[float]"
    reference_N: "array[float] | None"
    values_N: "array[float] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser update."""

    step: int  # of the run: places the learning rate
    scale: float  # the accumulated sums are multiplied by this
    critic_scale: float
    policy: bool  # False: the critic learns alone


DUMMY = Sample(
    group_id=0,
    index=0,
    tokens=array("i", [0, 0]),
    places_N=array("i"),
    behaviour_N=array("f"),
    advantages_N=array("d"),
    fresh_N=array("b"),
    proximal_N=array("f"),
    reference_N=array("f"),
    values_N=array("f"),
    returns_N=array("d"),
)
"""Stands in where a rank has no sample: the same passes and collectives, no trained token, no gradient."""


def make_sample(trajectory: pb.Trajectory, *, step: int, attempt: int, advantage: float = 0.0) -> Sample:
    """A trajectory to be trained in `step` of `attempt`, all its tokens with one advantage."""
    prompt, completion = unpack_int32(trajectory.prompt_tokens), unpack_int32(trajectory.tokens)
    behaviour = unpack_float32(trajectory.logprobs)
    name = f"group {trajectory.group_id} sample {trajectory.sample_index}"
    assert prompt, f"{name} has no prompt tokens"
    assert len(behaviour) == len(completion), f"{name} has {len(completion)} tokens and {len(behaviour)} log-probs"
    spans = sum(span.tokens for span in trajectory.spans)
    assert spans == len(completion), f"versions of {name} do not cover its tokens"
    places = trained_places(trajectory)
    fresh = array("b")
    for span in trained_spans(trajectory):
        fresh.extend([int((span.attempt, span.step) == (attempt, step))] * span.tokens)
    return Sample(
        group_id=trajectory.group_id,
        index=trajectory.sample_index,
        tokens=(prompt + completion)[: len(prompt) + places[-1] + 1],
        places_N=array("i", [len(prompt) + place for place in places]),
        behaviour_N=array("f", [behaviour[place] for place in places]),
        advantages_N=array("d", [advantage]) * len(places),
        fresh_N=fresh,
    )


def rounds(batches: Sequence[list[Sample]], *, ranks: int) -> list[list[list[Sample]]]:
    """Batches in rounds of one for each rank; ranks that are left over in the last round get an empty one."""
    padded = [*batches, *([[]] * (-len(batches) % ranks))]
    return [list(padded[begin : begin + ranks]) for begin in range(0, len(padded), ranks)]


def cut(samples: Sequence[Sample], *, budget_tokens: int) -> list[list[Sample]]:
    """Batches for one forward pass each, longest samples first."""
    batches: list[list[Sample]] = []
    padding = 0
    for sample in sorted(samples, key=lambda s: -s.inputs):
        longest = batches[-1][0].inputs if batches else 0
        padding += longest - sample.inputs
        fits = batches and longest * (len(batches[-1]) + 1) <= budget_tokens and padding <= PADDING_TOKENS
        if fits:
            batches[-1].append(sample)
        else:
            batches.append([sample])
            padding = 0
    return batches


def deal(samples: Sequence[Sample], *, budget_tokens: int, ranks: int) -> list[list[Sample]]:
    """Batches as `cut` makes them, for `rounds`: each round's are alike, and none is missing as long as samples can be parted.

    A round takes as long as its largest batch, and a rank without a batch passes a dummy meanwhile.
    """
    if ranks == 1 or not samples:
        return cut(samples, budget_tokens=budget_tokens)
    total, longest = sum(s.inputs for s in samples), max(s.inputs for s in samples)
    fewest = -(-total // (ranks * budget_tokens))
    shares = [total // (ranks * count) + longest for count in range(fewest, fewest + _TRIED_ROUNDS)]
    budgets = sorted({budget_tokens, *(min(budget_tokens, share) for share in shares)}, reverse=True)
    dealt = [_parted(cut(samples, budget_tokens=budget), ranks=ranks) for budget in budgets]
    return min(dealt, key=lambda batches: _time_tokens(batches, ranks=ranks))


def _parted(batches: list[list[Sample]], *, ranks: int) -> list[list[Sample]]:
    """Halve the largest batches until every rank has one in every round; the largest come first."""
    parted = list(batches)
    while len(parted) % ranks:
        largest = max((b for b in parted if len(b) > 1), key=_padded_tokens, default=None)
        if largest is None:
            break
        parted.remove(largest)
        parted += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return sorted(parted, key=_padded_tokens, reverse=True)


def _padded_tokens(batch: Sequence[Sample]) -> int:
    return len(batch) * max(sample.inputs for sample in batch)


def _time_tokens(batches: Sequence[Sequence[Sample]], *, ranks: int) -> int:
    """Of all rounds, in tokens: the first batch of a round is its largest."""
    return sum(_padded_tokens(batch) + PADDING_TOKENS for batch in batches[::ranks])


class Pending:
    """Samples that wait for a micro-step of all ranks."""

    def __init__(self, *, budget_tokens: int, ranks: int = 1) -> None:
        self._budget_tokens = budget_tokens
        self._ranks = ranks
        self._samples: list[Sample] = []
        self._tokens = 0

    def add(self, sample: Sample) -> None:
        """Let one more wait."""
        self._samples.append(sample)
        self._tokens += sample.inputs

    def take(self, *, idle: bool) -> list[list[Sample]]:
        """All that wait, cut into batches, if that is a full budget for every rank (idle: a quarter); else nothing."""
        full = self._budget_tokens * self._ranks
        threshold = full // IDLE_SHARE if idle else full
        return self.take_all() if self._samples and self._tokens >= threshold else []

    def take_all(self) -> list[list[Sample]]:
        """All that wait, cut into batches."""
        samples, self._samples, self._tokens = self._samples, [], 0
        return deal(samples, budget_tokens=self._budget_tokens, ranks=self._ranks)
