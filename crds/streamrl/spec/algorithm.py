"""The learning rule: algorithms, what they share, corrections for samples of another policy."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from streamrl.spec.base import ByteQuantity, FieldRule, OneOf, PythonClass, SpecModel
from streamrl.spec.model import FrozenModel

LARGEST_REWARD = 1e9
"""Of a log, either way: sums of squares of what a critic is to learn stay numbers."""


class ReferenceKl(SpecModel):
    """A pull towards the initial model, by an estimate of the Kullback-Leibler divergence to it."""

    coefficient: float = Field(default=0.001, ge=0, le=100, description="Weight of the divergence; 0 only measures it.")
    estimator: Literal["K1", "K2", "K3"] = Field(
        default="K3",
        description="Of log-ratio d = log policy - log reference: K1 d, K2 d^2/2, K3 exp(-d) - 1 + d (Schulman).",
    )


ReferenceKlField = Annotated[
    ReferenceKl | None, Field(default=None, description="Pull towards the initial model; absent = none.")
]


class ClipBounds(SpecModel):
    """The bounds of PPO's clip (arXiv 1707.06347, eq. 7)."""

    clip_low: float = Field(
        default=0.2, gt=0, lt=1, description="Ratios below 1 - clipLow get no gradient where that would lower them."
    )
    clip_high: float = Field(
        default=0.2, gt=0, le=10, description="Ratios above 1 + clipHigh get no gradient where that would raise them."
    )


class Clip(ClipBounds):
    """The same, and a pull towards the initial model."""

    reference_kl: ReferenceKlField = None


class GrpoSpec(Clip):
    """Group relative policy optimisation (arXiv 2402.03300) on streamed, possibly stale samples."""

    normalize_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")
    aggregation: Literal["SequenceMean", "TokenMean"] = Field(
        default="SequenceMean", description="Mean over each sample's tokens first, or over all tokens of the step."
    )


class DrGrpoSpec(Clip):
    """GRPO without its length and difficulty biases (arXiv 2503.20783): no division by length or deviation."""


class Overlong(SpecModel):
    """Soft punishment of completions that come close to `maxTokens` (arXiv 2503.14476, eq. 13)."""

    buffer_tokens: int = Field(description="The punishment grows over the last so many tokens.", ge=1, le=1_048_576)
    penalty: float = Field(default=1.0, gt=0, le=100, description="Punishment of a completion of full length.")


class DynamicSamplingSpec(SpecModel):
    """Groups whose rewards are all equal teach nothing: they are dropped, and others take their places."""

    max_draws_per_step: int = Field(
        default=4,
        ge=1,
        le=64,
        description="Batches that may be scored for one step; once they are used up, equal groups are taken. 1 = nothing is dropped.",
    )


class DapoSpec(Clip):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476): higher upper bound, token-level loss."""

    clip_high: float = Field(default=0.28, gt=0, le=10, description="As in `grpo`.")
    overlong: Overlong | None = Field(default=None, description="Punishment of long completions; absent = none.")
    dynamic_sampling: DynamicSamplingSpec = Field(
        default=DynamicSamplingSpec(), description="Groups with equal rewards are drawn again."
    )


class RlooSpec(Clip):
    """REINFORCE with the mean of the other samples as baseline (arXiv 2402.14740)."""


class GspoSpec(Clip):
    """Group sequence policy optimisation (arXiv 2507.18071): one ratio for a whole sequence."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1, description="As in `grpo`, for the sequence's ratio.")
    clip_high: float = Field(default=4e-4, gt=0, le=10, description="As in `grpo`, for the sequence's ratio.")
    normalize_std: bool = Field(default=True, description="Divide advantages by the group's standard deviation.")


class Updates(Clip):
    """Several optimiser updates on one batch."""

    epochs: int = Field(default=1, ge=1, le=64, description="Passes over the batch.")
    mini_batches: int = Field(default=1, ge=1, le=1024, description="Optimiser updates a pass.")


class ReinforcePlusPlusSpec(Updates):
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch; divergence in the reward."""

    discount: float = Field(default=1.0, gt=0, le=1, description="Discount of a reward for each token before it.")


class Critic(SpecModel):
    """The value model: the initial model's body with a scalar head."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="Learning rate of the critic.")
    value_clip: float = Field(
        default=0.2, gt=0, le=1e6, description="Values move at most so far from those of the batch's start."
    )
    warm_up_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="First steps in which the critic learns alone."
    )


class PpoSpec(Updates):
    """Proximal policy optimisation (arXiv 1707.06347) with a critic and generalised advantages (arXiv 1506.02438)."""

    discount: float = Field(default=1.0, gt=0, le=1, description="Discount of a reward for each token before it.")
    gae_lambda: float = Field(default=1.0, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    critic: Critic = Field(default=Critic(), description="The value model.")


class Replay(SpecModel):
    """Samples that a step trains again besides its own groups, from a buffer in the trainer that is part of its checkpoints."""

    share_percent: int = Field(
        default=5,
        ge=1,
        le=90,
        description="Share of replayed groups among those that a step trains; each is one prompt with up to `groupSize` samples.",
    )
    by: Literal["Recency", "Reward"] = Field(
        default="Reward",
        description="Which samples of a prompt. Recency: the newest. Reward: drawn with weights exp(reward).",
    )
    capacity: int = Field(default=100, ge=2, le=65_536, description="Samples kept of one prompt; the oldest leave.")
    max_bytes: ByteQuantity = Field(
        default="256Mi",
        description="Tokens and log-probs of all samples, in main memory and in each checkpoint; the oldest leave.",
    )


class TbaSpec(SpecModel):
    """Trajectory balance (TBA, arXiv 2503.18929): the policy becomes the initial model times exp(reward / beta), whoever drew the samples."""

    beta: float = Field(
        default=0.01, gt=0, le=1000, description="Temperature of the target; large values stay near the initial model."
    )
    mini_batches: int = Field(default=1, ge=1, le=1024, description="Optimiser updates a step.")
    replay: Replay | None = Field(default=None, description="Samples that are trained again; absent = none.")

    @property
    def epochs(self) -> int:
        """Passes over the batch."""
        return 1

    @property
    def reference_kl(self) -> ReferenceKl:
        """The initial model is part of the target; the divergence from it is only measured."""
        return ReferenceKl(coefficient=0.0)


class DualGenerator(SpecModel):
    """The policy and a second generator make up the log together (arXiv 2211.01471): the policy takes the better part, and leaves the log nowhere."""

    share_percent: int = Field(
        default=50,
        ge=1,
        le=99,
        description="The policy's part of each prompt's answers, in percent. 50: the better half, no answer twice as likely as in the log.",
    )


class AdvantageWeights(SpecModel):
    """Weight exp((reward - mean of the prompt's answers) / beta), bounded (arXiv 1910.00177)."""

    beta: float = Field(
        default=0.5, gt=0, le=1e6, description="Reward that is worth a factor e; large values imitate all alike."
    )
    most: float = Field(default=20.0, ge=1, le=1e6, description="Largest weight.")

    def weight(self, advantage: float) -> float:
        """min(exp(advantage / beta), most)."""
        return math.exp(min(advantage / self.beta, math.log(self.most)))


class UtteranceCritic(SpecModel):
    """Two values of each state and two of each utterance, on the initial model's body; and a copy of them that follows slowly."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1, description="Learning rate of the critic.")
    target_rate: float = Field(
        default=0.1, gt=0, le=1, description="Share of the way to the critic that the copy goes with each update."
    )
    warm_up_steps: int = Field(
        default=0, ge=0, le=1_000_000, description="First steps in which the critic learns alone."
    )

    value_clip: ClassVar[float] = math.inf
    """There is none."""


class CriticWeights(AdvantageWeights, UtteranceCritic):
    """Weight exp((Q - V) / beta) of each turn, bounded, by a critic of turns that learns from the log alone (IQL, arXiv 2110.06169)."""

    expectile: float = Field(
        default=0.7,
        gt=0,
        lt=1,
        description="V is this expectile of Q over the log's turns. 0.5: their mean; towards 1: the best of them.",
    )
    discount: float = Field(default=0.9, gt=0, le=1, description="Discount of a reward for each turn before it.")
    epochs: int = Field(default=4, ge=1, le=64, description="Passes of the critic over a step's rows.")
    mini_batches: int = Field(default=4, ge=1, le=1024, description="Updates of the critic a pass.")

    reference_kl: ClassVar[None] = None
    """There is none."""


class AnswerWeights(OneOf):
    """How much an answer of the log counts."""

    dual_generator: DualGenerator | None = Field(default=None, description="The better part of each prompt's answers.")
    advantage: AdvantageWeights | None = Field(default=None, description="All answers, the better ones more.")
    critic: CriticWeights | None = Field(
        default=None, description="Each turn by what follows it, for logs of several turns; trains a second model."
    )


class EpisodeReplay(SpecModel):
    """Earlier samples that teach the critic again, from a buffer in the trainer that is part of its checkpoints."""

    share_percent: int = Field(
        default=75, ge=1, le=95, description="Share of earlier samples among those that a step teaches its critic by."
    )
    capacity: int = Field(default=10_000, ge=2, le=10_000_000, description="Samples kept; the oldest leave.")
    max_bytes: ByteQuantity = Field(
        default="256Mi",
        description="Tokens and log-probs of all samples, in main memory and in each checkpoint; the oldest leave.",
    )


class Resample(SpecModel):
    """Groups that play no game: their samples are one turn each, drawn anew where an earlier sample's turn began."""

    share_percent: int = Field(default=50, ge=1, le=90, description="Share of such groups among those of a step.")


class ArcherSpec(Updates):
    """ArCHer (arXiv 2402.19446): an off-policy critic of whole utterances, an actor of tokens."""

    epochs: int = Field(
        default=4, ge=1, le=64, description="Passes of the critic over a step's samples, with the replayed ones."
    )
    mini_batches: int = Field(default=4, ge=1, le=1024, description="Updates of the critic a pass.")
    discount: float = Field(default=0.9, gt=0, le=1, description="Discount of a reward for each turn before it.")
    critic: UtteranceCritic = Field(default=UtteranceCritic(), description="The critic.")
    replay: EpisodeReplay = Field(default=EpisodeReplay(), description="Earlier samples that teach the critic again.")
    resample: Resample | None = Field(
        default=None, description="Turns drawn anew at replayed states, for the actor; absent = none."
    )


class SupervisedSpec(SpecModel):
    """Supervised fine-tuning: the data set's own answers are the samples, and nothing is generated for them."""

    answers: Literal["Texts", "Tokens"] = Field(
        default="Texts",
        description="What is imitated. Texts: `answerField`, or what `format` makes. Tokens: a row's `prompt_tokens`, `tokens` and `segments`, as `streamrl samples --json` writes them.",
    )

    reward_field: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Field of a row with what its answer earned, a number; absent = rows have none.",
    )
    min_reward: float | None = Field(
        default=None,
        ge=-LARGEST_REWARD,
        le=LARGEST_REWARD,
        description="Rows that earned less are left out; absent = all are trained.",
    )
    weights: AnswerWeights | None = Field(
        default=None, description="Weights of rows, or of their turns; absent = all count alike."
    )

    @property
    def critic(self) -> CriticWeights | None:
        """None: weights, if any, follow from the rewards of rows."""
        return None if self.weights is None else self.weights.critic

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "weights needs rewardField",
            "!has(self.weights) || has(self.rewardField)",
        ),
        FieldRule(
            "minReward needs rewardField",
            "!has(self.minReward) || has(self.rewardField)",
        ),
    )

    reference_kl: ClassVar[None] = None
    """There is none."""


class DistillationSpec(ClipBounds):
    """On-policy distillation (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649): a teacher says of each token that the policy drew how likely it is."""

    teacher: FrozenModel = Field(description="The model that is imitated; its tokenizer is that of `model`.")
    reward_weight: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="Weight of the rewards' advantage (of `grpo`) beside the teacher's log-ratio; 0 only measures rewards.",
    )

    @property
    def reference_kl(self) -> ReferenceKl:
        """The divergence from the teacher is only measured: it is the advantage."""
        return ReferenceKl(coefficient=0.0, estimator="K1")


class TwoSidedClip(SpecModel):
    """The ratio is that of policy to behaviour; where the advantage is negative it is bounded too (arXiv 1912.09729)."""

    cap: float = Field(default=5.0, ge=1, le=1000, description="Largest ratio of policy to behaviour probability.")


ImportanceLevel = Literal["Token", "Sequence"]
ImportanceLevelField = Annotated[
    ImportanceLevel,
    Field(
        default="Token",
        description="Token: each token has the ratio of its own probabilities. Sequence: all tokens have the product over their sequence, exact but wide.",
    ),
]


class TruncatedImportance(SpecModel):
    """Weight min(proximal / behaviour, cap); the clip is on policy / proximal."""

    level: ImportanceLevelField = "Token"
    cap: float = Field(default=2.0, ge=1, le=1000, description="Largest weight.")


class MaskedImportance(SpecModel):
    """Weight proximal / behaviour where that is within bounds, else 0; the clip is on policy / proximal."""

    level: ImportanceLevelField = "Token"
    low: float = Field(default=0.5, ge=0, le=1, description="What has a smaller weight is left out.")
    high: float = Field(default=2.0, ge=1, le=1000, description="What has a larger weight is left out.")


class DecoupledPpo(SpecModel):
    """Weight proximal / behaviour (arXiv 2505.24298, eq. 5); tokens above the cap are left out."""

    cap: float = Field(default=5.0, ge=1, le=1000, description="Tokens with a larger weight are masked.")


class M2po(SpecModel):
    """Second-moment trust region (arXiv 2510.01161): the tokens with the largest log-ratios of a step are left out."""

    threshold: float = Field(
        default=0.04,
        gt=0,
        le=100,
        description="Largest mean of (log proximal - log behaviour)^2 over the tokens of a step that are not left out.",
    )


class Correction(OneOf):
    """How samples that another policy drew (older weights, other arithmetic) are corrected for."""

    two_sided_clip: TwoSidedClip | None = Field(default=None, description="Ratio to the behaviour policy, bounded.")
    truncated_importance: TruncatedImportance | None = Field(
        default=None, description="Truncated importance weights before the clip."
    )
    masked_importance: MaskedImportance | None = Field(
        default=None, description="Importance weights before the clip; what is out of bounds is left out."
    )
    decoupled_ppo: DecoupledPpo | None = Field(default=None, description="Full importance weights before the clip.")
    m2po: M2po | None = Field(
        default=None,
        alias="m2po",
        description="Full importance weights; as few tokens as possible are left out to bound the step's mean squared log-ratio.",
    )
    python: PythonClass | None = Field(default=None, description="A class of your own, or of an installed package.")


class Advantage(OneOf):
    """Advantages of a group's samples, in place of the algorithm's own."""

    python: PythonClass | None = Field(default=None, description="A class of your own, or of an installed package.")


KL_ALGORITHMS = ("grpo", "drGrpo", "dapo", "rloo", "reinforcePP", "ppo", "gspo", "archer")
"""That take a `referenceKl`."""
GROUP_ALGORITHMS = ("grpo", "drGrpo", "dapo", "rloo", "gspo", "python")
"""With an advantage of each sample of a group."""


class AlgorithmSpec(OneOf):
    """The learning rule."""

    one_of: ClassVar[tuple[str, ...]] = (
        "grpo",
        "dr_grpo",
        "dapo",
        "rloo",
        "reinforce_pp",
        "ppo",
        "gspo",
        "trajectory_balance",
        "archer",
        "distillation",
        "supervised",
        "python",
    )

    grpo: GrpoSpec | None = Field(default=None, description="Group relative policy optimisation.")
    dr_grpo: DrGrpoSpec | None = Field(default=None, description="GRPO without its length and difficulty biases.")
    dapo: DapoSpec | None = Field(default=None, description="Clip-higher, token-level loss, dynamic sampling.")
    rloo: RlooSpec | None = Field(default=None, description="REINFORCE with a leave-one-out baseline.")
    reinforce_pp: ReinforcePlusPlusSpec | None = Field(
        default=None, alias="reinforcePP", description="REINFORCE with batch-normalised advantages."
    )
    ppo: PpoSpec | None = Field(default=None, description="Proximal policy optimisation with a critic.")
    gspo: GspoSpec | None = Field(default=None, description="Sequence-level ratios.")
    trajectory_balance: TbaSpec | None = Field(
        default=None, description="Trajectory balance, right for samples of any age."
    )
    archer: ArcherSpec | None = Field(
        default=None, description="A critic of utterances, for tasks of several turns that reward late."
    )
    distillation: DistillationSpec | None = Field(
        default=None, description="Reverse divergence from a teacher, on the policy's own samples."
    )
    supervised: SupervisedSpec | None = Field(
        default=None, description="Cross-entropy of the data set's own answers; needs no generators."
    )
    python: PythonClass | None = Field(default=None, description="A class of your own, or of an installed package.")
    correction: Correction = Field(
        default_factory=lambda: Correction.model_validate({"twoSidedClip": {}}),
        description="Correction for samples of another policy.",
    )
    advantage: Advantage | None = Field(
        default=None, description="Advantages of a group's samples; absent = the algorithm's own."
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "correction m2po must not be used with gspo: it is of tokens, gspo's ratios are of sequences",
            "!has(self.gspo) || !has(self.correction.m2po)",
        ),
        FieldRule(
            "correction m2po must not be used with archer: its bound is of the whole step, replayed samples too",
            "!has(self.archer) || !has(self.correction.m2po)",
        ),
        FieldRule(
            "correction must be absent with trajectoryBalance: it needs none",
            "!has(self.trajectoryBalance) || has(self.correction.twoSidedClip)",
            "{self.correction.key}",
        ),
        FieldRule(
            "correction must be absent with supervised: no policy drew its samples",
            "!has(self.supervised) || has(self.correction.twoSidedClip)",
            "{self.correction.key}",
        ),
        FieldRule(
            f"advantage goes with {', '.join(GROUP_ALGORITHMS)} alone: others have advantages of tokens",
            f"!has(self.advantage) || {' || '.join(f'has(self.{key})' for key in GROUP_ALGORITHMS)}",
            "{self.key}",
        ),
    )

    @property
    def teacher(self) -> FrozenModel | None:
        """The model that is imitated; None: there is none."""
        return None if self.distillation is None else self.distillation.teacher

    @property
    def critic(self) -> Critic | UtteranceCritic | None:
        """Constants of the second model that is trained; None: there is none."""
        return getattr(self.value, "critic", None)
