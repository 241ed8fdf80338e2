"""Which samples go into one forward pass. Pure; no torch.

A pass of one rank is a micro-batch; a pass of all ranks is a round. Ranks gather each block together, so a round takes as long as its
most expensive micro-batch: it is dealt by cost (docs/decisions/0090-rows-without-padding.md). A sample with several contexts is several
here: each has what the model saw, and its own trained tokens.

Invariants: `pack` puts every sample into exactly one micro-batch. Its tokens, padding included, are at most the budget, or the longest
sample of its round. Every round has a micro-batch for each rank: an empty one where no sample is left.
"""

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.stream.segments import trained_contexts
from streamrl_workers.trainer.engines.step_metrics import version_lag

PADDING_TOKENS = 256
"""Maximum padding of a micro-batch whose samples are rows: about the cost of one more forward pass (measured, decision 0004)."""

IDLE_SHARE = 4
"""With nothing else to do, a micro-step starts at this fraction (1/4) of the token budget: smaller ones use the machine badly."""

EVEN_PERCENT = 96
"""Minimum mean cost of a round's micro-batches, in percent of the largest, for it to start while samples still arrive."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the samples of a micro-batch lie, and what a sample costs."""

    packed: bool  # one after the other in one row; else a row each, padded on the right to the longest
    attention_tokens: float  # length of a sample at which attention costs as much as all else

    def cost(self, tokens: int) -> float:
        """Return the time of a sample of this length, in tokens of short samples."""
        return tokens * (1.0 + tokens / self.attention_tokens)


class _MicroBatch:
    """Samples of one rank's pass, longest first."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.samples: list[PackedSample] = []
        self.tokens, self.cost = 0, 0.0  # cost: with that of padding

    def add(self, sample: PackedSample) -> None:
        """Take one that is within `span`."""
        self.samples.append(sample)
        self.tokens += sample.inputs
        self.cost += self._layout.cost((sample if self._layout.packed else self.samples[0]).inputs)

    def span(self, limit_tokens: int) -> tuple[int, int]:
        """Return the least and the greatest length of a sample that fits beside the others."""
        count = len(self.samples)
        if self._layout.packed or not count:
            return 0, limit_tokens - self.tokens
        longest = self.samples[0].inputs
        padding = count * longest - self.tokens
        return longest - (PADDING_TOKENS - padding), longest if longest * (count + 1) <= limit_tokens else 0


def pack(
    samples: Sequence[PackedSample], *, budget_tokens: int, layout: Layout, ranks: int = 1
) -> list[list[list[PackedSample]]]:
    """Return rounds, each with a micro-batch for each rank; the longest samples come first."""
    rounds = _rounds(samples, budget_tokens=budget_tokens, layout=layout, ranks=ranks)
    return [[batch.samples for batch in batches] for batches in rounds]


def _rounds(
    samples: Sequence[PackedSample], *, budget_tokens: int, layout: Layout, ranks: int
) -> list[list[_MicroBatch]]:
    rest = sorted(samples, key=_inputs, reverse=True)[::-1]  # of equals the first is dealt first
    rounds = []
    while rest:
        limit = max(budget_tokens, rest[-1].inputs)
        rounds.append(_deal(rest, limit_tokens=limit, batches=[_MicroBatch(layout) for _ in range(ranks)]))
    return rounds


def _deal(rest: list[PackedSample], *, limit_tokens: int, batches: list[_MicroBatch]) -> list[_MicroBatch]:
    """Fill a round from `rest`, which ascends: the cheapest micro-batch takes the longest sample that fits, until none fits."""
    cheapest = [(0.0, rank) for rank in range(len(batches))]
    while cheapest and rest:
        _, rank = heapq.heappop(cheapest)
        least, most = batches[rank].span(limit_tokens)
        place = bisect_right(rest, most, key=_inputs) - 1
        if place >= 0 and rest[place].inputs >= least:
            batches[rank].add(rest.pop(place))
            heapq.heappush(cheapest, (batches[rank].cost, rank))
    return batches


def _inputs(sample: PackedSample) -> int:
    return sample.inputs


class Pending:
    """Samples that wait for a micro-step of all ranks."""

    def __init__(self, *, budget_tokens: int, layout: Layout, ranks: int = 1) -> None:
        self._budget_tokens = budget_tokens
        self._layout = layout
        self._ranks = ranks
        self._samples: list[PackedSample] = []

    def add(self, sample: PackedSample) -> None:
        """Let one more wait."""
        self._samples.append(sample)

    def take(self, *, idle: bool) -> list[list[list[PackedSample]]]:
        """Return rounds if samples wait for a full budget of every rank (idle: a quarter).

        Those in which ranks are alike; the samples of the others wait for better company. Idle: all of them.
        """
        full = self._budget_tokens * self._ranks
        tokens = sum(map(_inputs, self._samples))
        if idle:
            return self.take_all() if tokens >= full // IDLE_SHARE else []
        if tokens < full:
            return []
        rounds = _rounds(self._samples, budget_tokens=self._budget_tokens, layout=self._layout, ranks=self._ranks)
        even = [batches for batches in rounds if self._is_even(batches)]
        self._samples = [s for batches in rounds if batches not in even for batch in batches for s in batch.samples]
        return [[batch.samples for batch in batches] for batches in even]

    def take_all(self) -> list[list[list[PackedSample]]]:
        """Return rounds with all samples that wait."""
        samples, self._samples = self._samples, []
        return pack(samples, budget_tokens=self._budget_tokens, layout=self._layout, ranks=self._ranks)

    def _is_even(self, batches: Sequence[_MicroBatch]) -> bool:
        """Whether a round uses all ranks well: at least a quarter of a full budget, dealt alike."""
        costs = [batch.cost for batch in batches]
        tokens = sum(batch.tokens for batch in batches)
        full = self._budget_tokens * self._ranks
        return tokens >= full // IDLE_SHARE and 100 * sum(costs) >= EVEN_PERCENT * len(costs) * max(costs)
