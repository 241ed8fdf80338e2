"""What the core needs to know of the job, in one value.

Owns no behaviour beyond reading it out of the specification.
"""

from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import SpecModel, parse_bytes
from streamrl.spec.rljob import RLJobSpec
from streamrl.spec.scheduling import Rebalance
from streamrl.spec.task import Sampling
from streamrl.spec.training import Algorithm, DynamicSampling, Mode
from streamrl_workers.scheduler.turns import Turns

MAX_ISSUES = 20
"""A sample issued so often (its generators died, or refused it) gives its group up."""
_WHOLE_BATCH_MODES: tuple[Mode, ...] = ("Colocated", "Batch")
"""Modes that hand over whole batches at a barrier."""
_TURN_MODES: tuple[Mode, ...] = ("Colocated",)
"""Modes in which generators and trainer share devices."""
MIN_LOOK_AHEAD = 64
MAX_LOOK_AHEAD = 8192
"""Prompts held ready: two batches within these bounds; texts are small, but the bound is not the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The job as the scheduler's core sees it."""

    batch_groups: int
    """B: groups of one step."""
    staleness: int
    """S of the staleness rule, in steps."""
    steps: int
    group_size: int
    """G: samples of one group."""
    sampling: pb.Sampling
    seed: int
    evaluation_prompts: int
    evaluation_interval: int
    """Steps between evaluations."""
    lease_s: float
    max_buffer_bytes: int
    dispatch: str
    """Key of the dispatch registry."""
    dispatch_options: SpecModel | None = None
    """Its member of the contract; None: the defaults."""
    rebalance: Rebalance | None = None
    """When running samples move; None: they never do."""
    length_signals: tuple[str, ...]
    """What predicts lengths, cheapest first (`scheduling.lengthSignals`)."""
    prompt_look_ahead: int
    partial_rollouts: bool = True
    """Whether a sample that runs may go on under another version."""
    whole_batches: bool = False
    """Whether groups are handed over only when a whole batch can be."""
    waits_are_turns: bool = False
    """Whether trainer and generators take turns on the same devices: each then waits for its turn."""
    draws_per_step: int = 1
    """Batches that may be scored for one step; above 1, groups with equal rewards are dropped."""
    max_issues: int = MAX_ISSUES
    max_turns: int | None = None
    """Turns of the model with the environment; None: there is none."""

    def new_turns(self) -> Turns | None:
        """Of a sample at its beginning."""
        return None if self.max_turns is None else Turns()

    @classmethod
    def from_job(cls, spec: RLJobSpec) -> "Settings":
        """Read the settings out of a validated specification."""
        pipeline, scheduling = spec.pipeline, spec.scheduling
        look_ahead = min(max(2 * pipeline.batch_groups, MIN_LOOK_AHEAD), MAX_LOOK_AHEAD)
        return cls(
            batch_groups=pipeline.batch_groups,
            staleness=pipeline.staleness,
            steps=pipeline.steps,
            group_size=spec.task.group_size,
            sampling=_sampling(spec.task.sampling),
            seed=spec.seed,
            evaluation_prompts=spec.task.evaluation.max_prompts,
            evaluation_interval=spec.task.evaluation.interval_steps,
            lease_s=scheduling.lease_seconds,
            max_buffer_bytes=parse_bytes(scheduling.max_buffer_bytes),
            dispatch=scheduling.dispatch.key,
            dispatch_options=scheduling.dispatch.value,
            rebalance=scheduling.rebalance,
            length_signals=scheduling.length_signals,
            prompt_look_ahead=look_ahead,
            partial_rollouts=pipeline.partial_rollouts,
            whole_batches=pipeline.mode in _WHOLE_BATCH_MODES,
            waits_are_turns=pipeline.mode in _TURN_MODES,
            draws_per_step=_draws_per_step(spec.algorithm),
            max_turns=None if spec.task.environment is None else spec.task.environment.max_turns,
        )


def _draws_per_step(algorithm: Algorithm) -> int:
    """An algorithm wants dynamic sampling if it has the field."""
    sampling = getattr(algorithm.value, "dynamic_sampling", None)
    return sampling.max_draws_per_step if isinstance(sampling, DynamicSampling) else 1


def _sampling(spec: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        max_tokens=spec.max_tokens,
        stop=spec.stop,
    )
