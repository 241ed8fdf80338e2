"""What the core needs to know of the job, in one value.

Owns no behaviour beyond reading it out of the specification.
"""

from dataclasses import dataclass

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import parse_bytes
from streamrl.spec.rljob import RLJobSpec
from streamrl.spec.task import Sampling

MAX_ISSUES = 20
"""A sample issued so often (its generators died, or refused it) gives its group up."""
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
    use_history: bool
    """Whether past lengths predict future ones."""
    prompt_look_ahead: int
    max_issues: int = MAX_ISSUES

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
            use_history="History" in scheduling.length_signals,
            prompt_look_ahead=look_ahead,
        )


def _sampling(spec: Sampling) -> pb.Sampling:
    return pb.Sampling(
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        max_tokens=spec.max_tokens,
        stop=spec.stop,
    )
