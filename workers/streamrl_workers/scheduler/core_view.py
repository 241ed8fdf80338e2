"""What metrics read of the present: the scheduler's state in numbers.

Owns the values; the core fills them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.policy import Plan
from streamrl_workers.scheduler.lengths import LengthsView
from streamrl_workers.scheduler.pool_view import PoolView


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreView:
    """The scheduler's state in numbers."""

    attempt: int
    step: int
    """Steps recorded in the effective history."""
    steps: int
    ended: bool
    groups_by_state: Mapping[str, int]
    """Groups in memory by state of life; the key set is stable."""
    waiting_samples: int
    active_leases: int
    buffered_bytes: int
    buffered_groups: int
    """Scored, in no step's record."""
    handed_groups: int
    """Of the step that is being handed over."""
    announced_step: int | None
    """Weight version that generators are told to use."""
    evaluating_step: int | None
    checkpoint: tuple[int, str] | None
    """Step and path of the newest one that the trainer has told of."""
    fleet: PoolView
    """All generators."""
    pools: Mapping[str, PoolView]
    """Pool -> its generators; a pool without a connected one is left out."""
    prompts_ready: int
    ignored_progress: int
    """Progress items of unknown or revoked leases, since the start."""
    reissued_samples: int
    """Since the start."""
    moved_samples: int
    """Samples that went on at another generator because it paid, since the start."""
    dropped_groups: Mapping[str, int]
    """Reason -> groups, since the start."""
    score_failures: Mapping[str, int]
    """Kind -> samples that got no reward, training and held-out ones, since the start."""
    plan: Plan
    """How dispatch goes now, and why."""
    speeds: Mapping[str, LatencyCurve]
    """Pool -> its curve, of its generator with the most slots."""
    lengths: LengthsView = field(default_factory=LengthsView)
    """What is predicted of lengths, and how well."""
