"""What the torch engine asks of an algorithm.

An algorithm is pure: what became of samples in, advantages out; log-probs in, one loss per token out. It does not batch, weigh
sequences against each other, hold a model, or step; and it knows nothing of modes, ranks, or streams.

Shapes: N tokens of any number of whole sequences, one behind the other. Only tokens that the model drew are among them:
prompts and what an environment answered are not. A sequence is a sample, or one context of it where a program edited its history:
a view has all of a sample's contexts, a pass has each as a sequence.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch

from streamrl.spec.algorithm import ClipBounds, Critic, ReferenceKl, UtteranceCritic
from streamrl.spec.base import PluginOptions
from streamrl_workers.trainer.algorithms.corrections import BatchMask, Corrected, Corrector

Aggregation = Literal["SequenceMean", "TokenMean", "SequenceSum", "FixedLength"]
"""How token losses become the loss of an update: the mean over samples of their token means; the mean over all tokens;
the mean over samples of their token sums; or the sum over all tokens divided by (samples x `maxTokens`), whatever the lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSetup:
    """What an algorithm is built from."""

    spec: Any  # the member's own model, as `streamrl.spec.algorithm.GrpoSpec`
    correction: Corrector
    mask: BatchMask | None = None  # of the correction
    max_tokens: int  # of one turn of the model
    advantage: "GroupAdvantage | None" = None  # in place of a group algorithm's own; None: its own


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """Consecutive tokens that the model drew."""

    tokens: int
    reward: float | None = None  # the environment's for this turn, a part of the sample's reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedSample:
    """What became of one sample, for algorithms that look at its group."""

    reward: float | None  # None: scoring failed
    turns: tuple[ModelTurn, ...]
    truncated: bool = False  # ended by `maxTokens`, not by itself
    weight: float = 1.0  # of the data set's own answer
    parts: Mapping[str, float] = field(default_factory=dict)  # what each of the job's rewards gave, by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """What became of one sample, token by token, for algorithms that look at the whole batch; N tokens of this sample."""

    reward: float
    turns: tuple[ModelTurn, ...]  # they cover the N tokens
    group_id: int = 0
    proximal_N: Sequence[float] | None = None  # log-probs under the weights of the batch's start
    reference_N: Sequence[float] | None = None  # log-probs of the initial model
    values_N: Sequence[float] | None = (
        None  # the critic's, as many of each token as it has heads (`engines/forward.py`)
    )
    target_values_N: Sequence[float] | None = None  # its copy's
    replayed: bool = False  # from the replay buffer
    resampled: bool = False  # one turn, drawn anew at an earlier state, whose reward nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenValues:
    """What a batch algorithm makes of a view."""

    advantages_N: Sequence[float]
    returns_N: Sequence[float] | None = None  # what the critic is to learn, for each of its values; NaN: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """The tokens of one forward pass, all log-probs at the sampling temperature."""

    logprobs_N: torch.Tensor  # of the policy in training; carries the gradient
    behaviour_N: torch.Tensor  # of the generator that drew the token
    proximal_N: torch.Tensor  # of the policy at the start of the step's updates, detached
    advantages_N: torch.Tensor
    sequences_N: torch.Tensor  # int64: which sequence of this pass the token is of
    reference_N: torch.Tensor | None = None  # of the frozen model: the initial one, or the teacher
    kept_N: torch.Tensor | None = (
        None  # bool: False where the correction's mask leaves the token out; None: there is no mask
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """What an algorithm makes of them."""

    loss_N: torch.Tensor
    clipped_N: torch.Tensor  # bool: the token gets no gradient because its ratio is out of bounds
    outside_N: torch.Tensor  # bool: its ratio is out of the clip's bounds, whatever the advantage
    weight_N: torch.Tensor  # of the correction, detached; 0 where it left the token out

    @classmethod
    def unclipped(cls, loss_N: torch.Tensor, *, weight_N: torch.Tensor | None = None) -> Self:
        """Make a loss without a clip; `weight_N`: None = 1."""
        nothing_N = torch.zeros_like(loss_N, dtype=torch.bool)
        weight_N = torch.ones_like(loss_N.detach()) if weight_N is None else weight_N
        return cls(loss_N=loss_N, clipped_N=nothing_N, outside_N=nothing_N, weight_N=weight_N)


def corrected(batch: TokenBatch, *, correction: Corrector) -> Corrected:
    """Apply a correction and its mask."""
    found = correction(proximal_N=batch.proximal_N, behaviour_N=batch.behaviour_N, sequences_N=batch.sequences_N)
    kept_N = batch.kept_N
    return found if kept_N is None else replace(found, weight_N=found.weight_N.masked_fill(~kept_N, 0.0))


class Algorithm(ABC):
    """What to learn from samples."""

    needs: ClassVar[Literal["group", "batch"]]
    aggregation: Aggregation
    critic: Critic | UtteranceCritic | None = None  # not None: a value model is wanted, of tokens or of utterances
    expectile: float = 0.5  # which one of what follows a state its value is to be; 0.5: the mean
    compares: ClassVar[bool] = (
        True  # False: no policy drew the samples whose log-probs could be compared with the trainer's
    )
    skips_equal: ClassVar[bool] = True  # False: groups whose advantages are all 0 have a gradient, and are trained

    def __init__(self, setup: AlgorithmSetup) -> None:
        # Options of a plug-in need not have these fields.
        self.reference_kl: ReferenceKl | None = getattr(
            setup.spec, "reference_kl", None
        )  # reference log-probs are wanted
        self._clip: ClipBounds = setup.spec  # where the algorithm clips
        self._correction = setup.correction
        self.mask = setup.mask  # not None: the step's log-probs are wanted before its first sample is trained

    def corrected(self, batch: TokenBatch) -> Corrected:
        """Apply the job's correction: what a ratio divides by, and the weight of each token's loss; 0 where it leaves one out."""
        return corrected(batch, correction=self._correction)

    @abstractmethod
    def token_loss(self, batch: TokenBatch) -> TokenLoss:
        """Loss of every token."""


class GroupAdvantage(ABC):
    """Base of plug-ins that say a group's advantages, in place of an algorithm's own."""

    def __init__(self, options: PluginOptions) -> None:
        self.options: Any = options

    @abstractmethod
    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """Advantage of each sample of one group; None: the sample has no reward and is left out."""


class GroupAlgorithm(Algorithm):
    """Needs whole groups: samples are trained as they stream in."""

    needs = "group"

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self._advantage = setup.advantage

    def group_advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """Return the advantages that the job asks for: another class's, or those of the algorithm."""
        return self.advantages(samples) if self._advantage is None else self._advantage.advantages(samples)

    @abstractmethod
    def advantages(self, samples: Sequence[RewardedSample]) -> list[float | None]:
        """Advantage of each sample of one group; None: the sample has no reward and is left out."""


class BatchAlgorithm(Algorithm):
    """Needs the whole batch: updates start when it is full; several are possible."""

    needs = "batch"
    critic_first: ClassVar[bool] = False
    """True: epochs and mini-batches are the critic's, over replayed samples too; then the policy is updated once, without these."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.epochs: int = getattr(setup.spec, "epochs", 1)
        self.mini_batches: int = getattr(setup.spec, "mini_batches", 1)

    @abstractmethod
    def values(self, views: Sequence[TokenView]) -> list[TokenValues]:
        """Advantages of every token of the batch; the views come in a fixed order, whatever order they streamed in."""
