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
from dataclasses import dataclass, replace

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.stream.segments import trained_contexts
from streamrl_workers.trainer.engines.step_metrics import version_lag

PADDING_TOKENS = 256
"""Maximum padding of a micro-batch whose samples are rows: about the cost of one more forward pass (measured, decision 0004)."""

IDLE_SHARE = 4
"""With nothing else to do, a micro-step starts at this fraction (1/4) of the token budget: smaller ones use the machine badly."""

_TRIED_ROUNDS = 3
"""Numbers of rounds that are tried above one rank with padding: one more can be shorter in all than one that is badly filled."""

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


def rehearsal_sample(count: int, *, critic_values: int = 0, vocabulary: int = 1) -> PackedSample:
    """Return a sample of `count` tokens, all but the first trained, with every number that any algorithm asks for.

    The tokens are all of the `vocabulary` in turn: equal ones would choose the same experts, and crowd the ranks that hold these.
    """
    trained = count - 1
    zeros_N, values_N = array("f", [0.0]) * trained, array("f", [0.0]) * (trained * critic_values)
    return replace(
        scored_sample([number % vocabulary for number in range(count)]),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the samples of a micro-batch lie, and what they cost."""

    packed: bool  # one after the other in one row; else a row each, padded on the right to the longest
    attention_tokens: float  # length of a sample at which attention costs as much as all else

    def cost(self, batch: Sequence[PackedSample]) -> float:
        """Return the time of a pass, in tokens of short samples."""
        if self.packed:
            return sum(map(self._row_cost, map(_inputs, batch)))
        return len(batch) * self._row_cost(max(map(_inputs, batch), default=0))

    def tokens(self, batch: Sequence[PackedSample]) -> int:
        """Return the tokens of a pass, padding included."""
        return sum(map(_inputs, batch)) if self.packed else _padded_tokens(batch)

    def _row_cost(self, tokens: int) -> float:
        return tokens * (1.0 + tokens / self.attention_tokens)


def pack(
    samples: Sequence[PackedSample], *, budget_tokens: int, layout: Layout, ranks: int = 1
) -> list[list[list[PackedSample]]]:
    """Return rounds, each with a micro-batch for each rank; the longest samples come first."""
    if not layout.packed:
        return _padded_rounds(samples, budget_tokens=budget_tokens, ranks=ranks)
    rest = sorted(samples, key=_inputs, reverse=True)[::-1]  # of equals the first is dealt first
    rounds = []
    while rest:
        limit = max(budget_tokens, rest[-1].inputs)
        rounds.append(_deal(rest, limit_tokens=limit, layout=layout, ranks=ranks))
    return rounds


def _deal(rest: list[PackedSample], *, limit_tokens: int, layout: Layout, ranks: int) -> list[list[PackedSample]]:
    """Make a round from `rest`, which ascends: the cheapest row takes the longest sample that it has room for, until no row has."""
    rows: list[list[PackedSample]] = [[] for _ in range(ranks)]
    cheapest = [(0.0, rank, limit_tokens) for rank in range(ranks)]
    while cheapest and rest:
        cost, rank, room = heapq.heappop(cheapest)
        place = bisect_right(rest, room, key=_inputs)
        if place:
            sample = rest.pop(place - 1)
            rows[rank].append(sample)
            heapq.heappush(cheapest, (cost + layout.cost([sample]), rank, room - sample.inputs))
    return rows


def _padded_rounds(
    samples: Sequence[PackedSample], *, budget_tokens: int, ranks: int
) -> list[list[list[PackedSample]]]:
    """Return rounds whose micro-batches are alike; none is empty as long as samples can be split.

    The budget is lowered where that fills the last round better.
    """
    total, longest = sum(map(_inputs, samples)), max(map(_inputs, samples), default=0)
    fewest = -(-total // (ranks * budget_tokens))
    shares = [
        total // (ranks * count) + longest for count in range(fewest, fewest + _TRIED_ROUNDS) if ranks > 1 and count
    ]
    budgets = sorted({budget_tokens, *(min(budget_tokens, share) for share in shares)}, reverse=True)
    tried = [_in_rounds(_alike(samples, budget_tokens=budget), ranks=ranks) for budget in budgets]
    return min(tried, key=lambda rounds: sum(_padded_tokens(batches[0]) + PADDING_TOKENS for batches in rounds))


def _alike(samples: Sequence[PackedSample], *, budget_tokens: int) -> list[list[PackedSample]]:
    """Cut samples into micro-batches of alike lengths, longest first."""
    batches: list[list[PackedSample]] = []
    padding = 0
    for sample in sorted(samples, key=_inputs, reverse=True):
        longest = batches[-1][0].inputs if batches else 0
        padding += longest - sample.inputs
        if batches and longest * (len(batches[-1]) + 1) <= budget_tokens and padding <= PADDING_TOKENS:
            batches[-1].append(sample)
        else:
            batches.append([sample])
            padding = 0
    return batches


def _in_rounds(batches: list[list[PackedSample]], *, ranks: int) -> list[list[list[PackedSample]]]:
    """Halve the largest micro-batches until every rank has one in every round; the largest come first."""
    halves = list(batches)
    while len(halves) % ranks:
        largest = max((b for b in halves if len(b) > 1), key=_padded_tokens, default=[])
        if not largest:
            break
        halves.remove(largest)
        halves += [largest[: len(largest) // 2], largest[len(largest) // 2 :]]
    halves.sort(key=_padded_tokens, reverse=True)
    halves += [[] for _ in range(-len(halves) % ranks)]
    return [halves[begin : begin + ranks] for begin in range(0, len(halves), ranks)]


def _padded_tokens(batch: Sequence[PackedSample]) -> int:
    return len(batch) * max(map(_inputs, batch), default=0)


def _inputs(sample: PackedSample) -> int:
    return sample.inputs


class Pending:
    """Samples that wait for a micro-step of all ranks."""

    def __init__(self, *, budget_tokens: int, layout: Layout, ranks: int = 1) -> None:
        self._budget_tokens = budget_tokens
        self._layout = layout
        self._ranks = ranks
        self.room_tokens = budget_tokens
        """Of a pass at most; when a micro-step begins depends on the budget alone."""
        self._samples: list[PackedSample] = []

    def add(self, sample: PackedSample) -> None:
        """Let one more wait."""
        self._samples.append(sample)

    def take(self, *, idle: bool) -> list[list[list[PackedSample]]]:
        """Return rounds if samples wait for a full budget of every rank (idle: a quarter).

        Of a full budget those in which ranks are alike; the samples of the others wait for better company. Idle: all, where there are none.
        So what is taken follows from what waits, and a replay need not know whether the trainer was idle.
        """
        full = self._budget_tokens * self._ranks
        tokens = sum(map(_inputs, self._samples))
        if tokens < (full // IDLE_SHARE if idle else full):
            return []
        rounds = self._packed()
        taken = [batches for batches in rounds if tokens >= full and self._is_even(batches)] or (rounds if idle else [])
        gone = {id(sample) for batches in taken for batch in batches for sample in batch}
        self._samples = [sample for sample in self._samples if id(sample) not in gone]  # in the order that they came in
        return taken

    def take_all(self) -> list[list[list[PackedSample]]]:
        """Return rounds with all samples that wait."""
        rounds, self._samples = self._packed(), []
        return rounds

    def _packed(self) -> list[list[list[PackedSample]]]:
        return pack(self._samples, budget_tokens=self.room_tokens, layout=self._layout, ranks=self._ranks)

    def _is_even(self, batches: Sequence[list[PackedSample]]) -> bool:
        """Whether a round uses all ranks well: at least a quarter of what passes may have, dealt alike."""
        costs = list(map(self._layout.cost, batches))
        tokens = sum(sample.inputs for batch in batches for sample in batch)
        full = self.room_tokens * self._ranks
        return tokens >= full // IDLE_SHARE and 100 * sum(costs) >= EVEN_PERCENT * len(costs) * max(costs)
