"""The proof of a first load: log-probs of fixed tokens, by the trainer and by a generator's engine under the same weights.

Owns: the tokens, how the trainer's log-probs travel (a tensor of bytes beside the model's, so they are part of the version's hash), the
bound, the error. Does not own how either side computes log-probs. Imports no torch.

Two sequences of different tokens, `short` and `long`. The long one crosses each length at which the configuration says that the model
changes (a sliding window, a second set of rotary factors), if the job's samples reach it and a forward pass has room for it.
The engine computes the short one alone, beside one of equal length, and beside the long one:

    spread = mean |alone - beside an equal|              what the engine's arithmetic alone makes of a batch
    bound  = clamp(5 spread, floor, 10 floor)            floor: 0.001 in float32, 0.05 in bfloat16; quantized weights: 10 floors
    fault  = max of mean |engine - trainer|              over short alone, short beside long, long

A wrong layer, expert, scale or position costs tenths of a nat and more.
"""

import itertools
import logging
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from google.protobuf.message import DecodeError

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.training import NumberFormat
from streamrl_workers.stream.packing import unpack_float32, unpack_int32
from streamrl_workers.weights.hashing import TensorBytes

log = logging.getLogger(__name__)

PROBE = "streamrl.probe"
"""Name of the tensor beside those of the model."""
SHORT_TOKENS, LONG_TOKENS = 64, 128
COMPARED_TOKENS = 32
"""Tokens after a switch that an engine compares."""
FLOOR = {"FP32": 1e-3, "BF16": 0.05}
"""Difference that is never a fault, in nats."""
PROBE_TEXT = """\
A train leaves the station at nine and travels west at 60 kilometres an hour. A second train leaves at ten and travels at 90. When does the
second one reach the first? Let t be the hours after ten. Then 90t = 60t + 60, so 30t = 60 and t = 2: they meet at noon. Write a function
that returns the largest of three numbers: def largest(a, b, c): return max(a, max(b, c)). The river rose all night, and by morning the lower
road was under water, so the children walked to school along the old railway line. "What do you see?" she asked. He said that the hills were
blue in the distance, that a heron stood in the reeds, and that the path had been empty since the snow melted in March.
"""
"""Text that models of natural language expect: on random tokens the rounding of bfloat16 alone is near 0.05 nats."""
TEXT_VOCABULARY = 1000
"""A tokenizer of fewer tokens is of characters or of a task's own words: it may not know those of a text."""
_SPREADS = 5
_CEILING = 10
"""The largest bound, in floors."""


class Scorer(Protocol):
    """Engine that returns log-probs."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.score`."""


def probe_tokens(
    texts: Sequence[int],
    *,
    begin: Sequence[int],
    limit_tokens: int,
    most_tokens: int,
    switches: Sequence[int],
    reach_tokens: int,
) -> tuple[list[int], list[int]]:
    """Return the short and the long sequence; empty ones where the model has no room.

    Args:
        texts: ids to take, from the first on, and again from the first.
        begin: ids that the tokenizer puts before each text.
        limit_tokens: what the model has positions for.
        most_tokens: of a sequence that crosses a switch: a longer one does not fit a forward pass.
        switches: lengths up to which it computes in one way, and above in another.
        reach_tokens: length of the job's longest sample.
    """
    most = min(limit_tokens - 1, max(most_tokens, LONG_TOKENS))
    crossed = [one for one in switches if one < reach_tokens and one + 1 + COMPARED_TOKENS <= most]
    long = max([LONG_TOKENS, *(one + 1 + COMPARED_TOKENS for one in crossed)])
    long = min([most, long, *(one for one in switches if one not in crossed)])
    short = min([SHORT_TOKENS, long // 2, *(one - 1 for one in switches)])
    if short < len(begin) + 2 or not texts:
        return [], []
    drawn = itertools.cycle(texts)
    return tuple([*begin, *(next(drawn) for _ in range(count - len(begin)))] for count in (short, long))  # type: ignore[return-value] # two


def as_tensor_bytes(probe: pb.Probe) -> dict[str, TensorBytes]:
    """Return the probe as a tensor to publish."""
    data = probe.SerializeToString(deterministic=True)
    return {PROBE: TensorBytes("uint8", (len(data),), memoryview(data))}


def take_probe(tensors: Mapping[str, TensorBytes]) -> tuple[dict[str, TensorBytes], pb.Probe | None]:
    """Separate the model's tensors from the probe. Raises ValueError if its bytes are no probe."""
    model = {name: tensor for name, tensor in tensors.items() if name != PROBE}
    if len(model) == len(tensors):
        return model, None
    try:
        probe = pb.Probe.FromString(bytes(tensors[PROBE].data))
    except DecodeError as error:
        raise ValueError(f"tensor {PROBE} cannot be read: {error}") from error
    for scored in (probe.short, probe.long):
        if len(scored.logprobs) != max(0, len(scored.tokens) - 4):
            raise ValueError(f"tensor {PROBE} has {len(scored.logprobs)} bytes of log-probs for {len(scored.tokens)}")
    return model, probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Prover:
    """Compares an engine with the trainer."""

    engine: str = "hf"
    precision: NumberFormat = "FP32"
    quantized: bool = False

    def prove(self, engine: Scorer, probe: pb.Probe) -> None:
        """Raise `UserError` if the engine's log-probs are not the trainer's. The engine holds no request."""
        wanted = [unpack_float32(scored.logprobs) for scored in (probe.short, probe.long)]
        if not wanted[0] or not all(map(math.isfinite, [*wanted[0], *wanted[1]])):
            return  # broken weights, not a broken engine: sampling reports them per request
        short, long = list(unpack_int32(probe.short.tokens)), list(unpack_int32(probe.long.tokens))
        (alone,) = engine.score([short])
        equal, _ = engine.score([short, long[: len(short)]])
        beside, longer = engine.score([short, long])
        if not alone:
            log.warning("%s has no room for %d tokens: its first load is not proved", self.engine, len(short))
            return
        bound = self.bound(_distance(alone, equal))
        faults = [_distance(*pair) for pair in ((alone, wanted[0]), (beside, wanted[0]), (longer, wanted[1]))]
        if not all(fault <= bound for fault in faults):  # NaN is above
            fault = max(faults, key=lambda one: (math.isnan(one), one))
            raise UserError(
                field="spec.generators[].engine",
                rule=f"must give the log-probs of the trainer, and {self.engine} on a model of family "
                f"{probe.family!r} differs by {fault:.2g} nats a token in the mean (at most {bound:.2g})",
                fix="take another engine for this model; nothing was generated",
            )

    def prove_alone(self, alone: Sequence[float], beside: Sequence[float], *, family: str) -> None:
        """Raise `UserError` if the log-probs of a sequence change with the others in its forward pass."""
        fault, bound = _distance(alone, beside), FLOOR[self.precision]
        if fault > bound:  # NaN: broken weights, which the first step counts
            raise UserError(
                field="spec.model",
                rule=f"must give each sample the same log-probs beside others, and family {family!r} in trainer engine {self.engine} "
                f"differs by {fault:.2g} nats a token in the mean (at most {bound:.2g})",
                fix="take another model",
            )

    def bound(self, spread: float) -> float:
        """Return the largest mean difference in nats that is no fault."""
        floor = FLOOR[self.precision]
        return _CEILING * floor if self.quantized else min(max(floor, _SPREADS * spread), _CEILING * floor)


def _distance(found: Sequence[float], wanted: "Sequence[float] | array[float]") -> float:
    """Return the mean difference over the last tokens, as many as both have; 0 without any."""
    count = min(len(found), len(wanted))
    if not count:
        return 0.0
    return fmean(abs(a - b) for a, b in zip(found[-count:], wanted[-count:], strict=True))
