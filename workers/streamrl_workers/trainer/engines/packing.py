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

PADDING_TOKENS = 256
"""A batch is closed before its padding exceeds this: about what one more forward pass costs (measured, decision 0004)."""

IDLE_SHARE = 4
"""With nothing else to do, a micro-step starts at this fraction (1/4) of the token budget: smaller ones use the machine badly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trajectory that takes part in the loss."""

    tokens: "array[int]"  # prompt and completion
    prompt_tokens: int  # how many of them are prompt, at least 1
    behaviour: "array[float]"  # log-prob of each completion token when it was drawn
    advantage: float
    fresh: tuple[tuple[int, bool], ...]  # (completion tokens, drawn under the very weights that are trained now)

    @property
    def inputs(self) -> int:
        """Tokens that a forward pass sees: all but the last, which predicts nothing."""
        return len(self.tokens) - 1

    @property
    def completion_tokens(self) -> int:
        """Tokens in the loss."""
        return len(self.behaviour)


def make_sample(trajectory: pb.Trajectory, *, advantage: float, step: int, attempt: int) -> Sample:
    """A trajectory with its advantage, to be trained in `step` of `attempt`."""
    prompt, completion = unpack_int32(trajectory.prompt_tokens), unpack_int32(trajectory.tokens)
    behaviour = unpack_float32(trajectory.logprobs)
    name = f"group {trajectory.group_id} sample {trajectory.sample_index}"
    assert prompt, f"{name} has no prompt tokens"
    assert len(behaviour) == len(completion), f"{name} has {len(completion)} tokens and {len(behaviour)} log-probs"
    fresh = tuple((span.tokens, (span.attempt, span.step) == (attempt, step)) for span in trajectory.spans)
    assert sum(tokens for tokens, _ in fresh) == len(completion), f"versions of {name} do not cover its tokens"
    return Sample(
        tokens=prompt + completion, prompt_tokens=len(prompt), behaviour=behaviour, advantage=advantage, fresh=fresh
    )


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


class Pending:
    """Samples that wait for a micro-step."""

    def __init__(self, *, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._samples: list[Sample] = []
        self._tokens = 0

    def add(self, sample: Sample) -> None:
        """Let one more wait."""
        self._samples.append(sample)
        self._tokens += sample.inputs

    def take(self, *, idle: bool) -> list[list[Sample]]:
        """All that wait, cut into batches, if that is a full budget (idle: a quarter); else nothing."""
        threshold = self._budget_tokens // IDLE_SHARE if idle else self._budget_tokens
        return self.take_all() if self._samples and self._tokens >= threshold else []

    def take_all(self) -> list[list[Sample]]:
        """All that wait, cut into batches."""
        samples, self._samples, self._tokens = self._samples, [], 0
        return cut(samples, budget_tokens=self._budget_tokens)
