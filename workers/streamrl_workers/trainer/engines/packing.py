"""Which samples go into one forward pass. Pure; no torch.

Samples are packed into right-padded batches of alike lengths (docs/decisions/0004-micro-batches.md). One with several contexts is
several here: each has what the model saw, and its own trained tokens.

Invariants: `pack` puts every sample into exactly one batch; a batch's padded tokens are within the budget, except
that a sample longer than the budget goes alone.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.stream.segments import trained_contexts
from streamrl_workers.trainer.engines.step_metrics import version_lag

PADDING_TOKENS = 256
"""A batch is closed before its padding exceeds this: about what one more forward pass costs (measured, decision 0004)."""

IDLE_SHARE = 4
"""With nothing else to do, a micro-step starts at this fraction (1/4) of the token budget: smaller ones use the machine badly."""

_TRIED_ROUNDS = 3
"""Above one rank so many numbers of rounds are tried: one round more can be shorter in all than one that is badly filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSample:
    """One sample, or one context of it, that takes part in the loss; N tokens of it were drawn by the model, only these are trained."""

    group_id: int
    index: int  # in its group
    tokens: "array[int]"  # prompt, turns and observations, up to the last trained one
    places_N: "array[int]"  # where the trained tokens are in `tokens`, ascending, none at 0
    behaviour_N: "array[float]"  # log-prob when the token was drawn
    advantages_N: "array[float]"
    context: int = 0  # in its sample
    trained_elsewhere: int = 0  # tokens that the sample's other contexts have in the loss
    generator_id: str = ""
    version_lag: int = 0  # steps, of the sample's oldest token
    proximal_N: "array[float] | None" = None  # log-probs under the weights of the batch's start
    reference_N: "array[float] | None" = None  # log-probs of the frozen model
    kept_N: "array[float] | None" = None  # 1 or 0: whether the correction's mask keeps the token
    values_N: "array[float] | None" = None  # the critic's at the batch's start, as many of each token as it has heads
    target_values_N: "array[float] | None" = None  # its copy's
    returns_N: "array[float] | None" = None  # what the critic is to learn, for each of its values; NaN: nothing

    @property
    def inputs(self) -> int:
        """Tokens that a forward pass sees: all but the last, which predicts nothing."""
        return len(self.tokens) - 1

    @property
    def trained(self) -> int:
        """Tokens in the loss."""
        return len(self.places_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One optimiser update."""

    step: int  # of the run: places the learning rate
    scale: float  # the accumulated sums are multiplied by this
    critic_scale: float
    policy: bool = True  # False: the critic learns alone
    critic: bool = True  # False: where there is one, it stays as it is


DUMMY = PackedSample(
    group_id=0,
    index=0,
    tokens=array("i", [0, 0]),
    places_N=array("i"),
    behaviour_N=array("f"),
    advantages_N=array("d"),
    proximal_N=array("f"),
    reference_N=array("f"),
    kept_N=array("f"),
    values_N=array("f"),
    target_values_N=array("f"),
    returns_N=array("d"),
)
"""Stands in where a rank has no sample: the same passes and collectives, no trained token, no gradient."""


def scored_sample(tokens: Sequence[int]) -> PackedSample:
    """Return tokens whose log-probs are wanted, of all but the first; none is trained."""
    count = len(tokens) - 1
    return PackedSample(
        group_id=0,
        index=0,
        tokens=array("i", tokens),
        places_N=array("i", range(1, count + 1)),
        behaviour_N=array("f", [0.0]) * count,
        advantages_N=array("d", [0.0]) * count,
    )


def rehearsal_sample(count: int, *, critic_values: int = 0) -> PackedSample:
    """Return a sample of `count` tokens, all but the first trained, with every number that any algorithm asks for."""
    trained = count - 1
    zeros_N, values_N = array("f", [0.0]) * trained, array("f", [0.0]) * (trained * critic_values)
    return replace(
        scored_sample([0] * count),
        proximal_N=zeros_N,
        reference_N=zeros_N,
        kept_N=array("f", [1.0]) * trained,
        values_N=values_N,
        target_values_N=values_N,
        returns_N=array("d", values_N),
    )


def pack_sample(sample: pb.Sample, *, step: int, attempt: int, advantage: float = 0.0) -> list[PackedSample]:
    """The contexts of a sample to be trained in `step` of `attempt`, all its tokens with one advantage."""
    prompt, completion = unpack_int32(sample.prompt_tokens), unpack_int32(sample.tokens)
    behaviour = unpack_float32(sample.logprobs)
    name = f"group {sample.group_id} sample {sample.sample_index}"
    assert prompt, f"{name} has no prompt tokens"
    assert len(behaviour) == len(completion), f"{name} has {len(completion)} tokens and {len(behaviour)} log-probs"
    spans = sum(span.tokens for span in sample.spans)
    assert spans == len(completion), f"versions of {name} do not cover its tokens"
    reference = unpack_float32(sample.reference_logprobs)
    assert not reference or len(reference) == len(completion), f"{name} has {len(reference)} log-probs of the reference"
    whole = prompt + completion
    lag = version_lag(sample, step=step, attempt=attempt)
    contexts = trained_contexts(sample)
    trained = sum(len(own) for _, own in contexts)
    packed = []
    for number, (begin, own) in enumerate(contexts):
        if not own:
            continue
        packed.append(
            PackedSample(
                group_id=sample.group_id,
                index=sample.sample_index,
                tokens=whole[begin : own[-1] + 1],
                places_N=array("i", [place - begin for place in own]),
                behaviour_N=array("f", [behaviour[place - len(prompt)] for place in own]),
                advantages_N=array("d", [advantage]) * len(own),
                context=number,
                trained_elsewhere=trained - len(own),
                generator_id=sample.generator_id,
                version_lag=lag,
                reference_N=array("f", [reference[place - len(prompt)] for place in own]) if reference else None,
            )
        )
    return packed


def rounds(batches: Sequence[list[PackedSample]], *, ranks: int) -> list[list[list[PackedSample]]]:
    """Batches in rounds of one for each rank; ranks that are left over in the last round get an empty one."""
    padded = [*batches, *([[]] * (-len(batches) % ranks))]
    return [list(padded[begin : begin + ranks]) for begin in range(0, len(padded), ranks)]


def pack(samples: Sequence[PackedSample], *, budget_tokens: int) -> list[list[PackedSample]]:
    """Batches for one forward pass each, longest samples first."""
    batches: list[list[PackedSample]] = []
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


def pack_for_ranks(samples: Sequence[PackedSample], *, budget_tokens: int, ranks: int) -> list[list[PackedSample]]:
    """Batches as `pack` makes them, for `rounds`: each round's are alike, and none is missing as long as samples can be split.

    A round takes as long as its largest batch, and a rank without a batch passes a dummy meanwhile.
    """
    if ranks == 1 or not samples:
        return pack(samples, budget_tokens=budget_tokens)
    total, longest = sum(s.inputs for s in samples), max(s.inputs for s in samples)
    fewest = -(-total // (ranks * budget_tokens))
    shares = [total // (ranks * count) + longest for count in range(fewest, fewest + _TRIED_ROUNDS)]
    budgets = sorted({budget_tokens, *(min(budget_tokens, share) for share in shares)}, reverse=True)
    packings = [_split(pack(samples, budget_tokens=budget), ranks=ranks) for budget in budgets]
    return min(packings, key=lambda batches: _time_tokens(batches, ranks=ranks))


def _split(batches: list[list[PackedSample]], *, ranks: int) -> list[list[PackedSample]]:
    """Halve the largest batches until every rank has one in every round; the largest come first."""
    halves = list(batches)
    while len(halves) % ranks:
        largest = max((b for b in halves if len(b) > 1), key=_padded_tokens, default=None)
        if largest is None:
            break
        halves.remove(largest)
        halves += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    return sorted(halves, key=_padded_tokens, reverse=True)


def _padded_tokens(batch: Sequence[PackedSample]) -> int:
    return len(batch) * max(sample.inputs for sample in batch)


def _time_tokens(batches: Sequence[Sequence[PackedSample]], *, ranks: int) -> int:
    """Of all rounds, in tokens: the first batch of a round is its largest."""
    return sum(_padded_tokens(batch) + PADDING_TOKENS for batch in batches[::ranks])


class Pending:
    """Samples that wait for a micro-step of all ranks."""

    def __init__(self, *, budget_tokens: int, ranks: int = 1) -> None:
        self._budget_tokens = budget_tokens
        self._ranks = ranks
        self.room_tokens = budget_tokens
        """Of a pass at most; when a micro-step begins depends on the budget alone."""
        self._samples: list[PackedSample] = []
        self._tokens = 0

    def add(self, sample: PackedSample) -> None:
        """Let one more wait."""
        self._samples.append(sample)
        self._tokens += sample.inputs

    def take(self, *, idle: bool) -> list[list[PackedSample]]:
        """All that wait, packed into batches, if that is a full budget for every rank (idle: a quarter); else nothing."""
        full = self._budget_tokens * self._ranks
        threshold = full // IDLE_SHARE if idle else full
        return self.take_all() if self._samples and self._tokens >= threshold else []

    def take_all(self) -> list[list[PackedSample]]:
        """All that wait, packed into batches."""
        samples, self._samples, self._tokens = self._samples, [], 0
        return pack_for_ranks(samples, budget_tokens=self.room_tokens, ranks=self._ranks)
