"""Settings of features that not every job uses."""

from dataclasses import dataclass

from streamrl.spec.algorithm import AlgorithmSpec, DynamicSamplingSpec
from streamrl.spec.rljob import RLJobSpec
from streamrl.spec.scheduling import Rebalance


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionSettings:
    """Features that not every job uses; each is read by its own module in `extensions/`."""

    supervised: bool = False
    """Whether samples are the data set's own answers; generators then evaluate only."""
    reference_pool: str = ""
    """The pool that computes the frozen model's log-probs of finished samples; empty: no pool does."""
    shared_pools: frozenset[str] = frozenset()
    """Pools on the trainer's devices."""
    colocated: bool = False
    """Whether all pools are on the trainer's devices."""
    shares_uplink: bool = False
    """Whether other clusters take versions over one uplink, one after the other."""
    resampled_percent: int = 0
    """Share of the groups that are single turns at states of earlier samples."""
    draws_per_step: int = 1
    """Maximum batches scored for one step; above 1, groups with equal rewards are dropped."""
    rebalance: Rebalance | None = None
    """When running samples move to another generator; None: never."""

    @classmethod
    def from_job(cls, spec: RLJobSpec, *, partial_rollouts: bool) -> "ExtensionSettings":
        """Read the settings from a validated specification. `partial_rollouts`: as of the scheduler's settings."""
        return cls(
            supervised=spec.algorithm.supervised is not None,
            reference_pool="" if spec.frozen_pool is None else spec.frozen_pool.name,
            shared_pools=frozenset(
                one.name for one in spec.generators if one.name in spec.lent_pools and one.engine.common.pauses
            ),
            colocated=len(spec.lent_pools) == len(spec.generators) > 0,
            shares_uplink=spec.weights.has_uplink and partial_rollouts,
            resampled_percent=_resampled_percent(spec.algorithm),
            draws_per_step=_draws_per_step(spec.algorithm),
            rebalance=spec.scheduling.rebalance,
        )


def _draws_per_step(algorithm: AlgorithmSpec) -> int:
    """Return the maximum batches for a step; an algorithm without the field has no dynamic sampling."""
    sampling = getattr(algorithm.value, "dynamic_sampling", None)
    return sampling.max_draws_per_step if isinstance(sampling, DynamicSamplingSpec) else 1


def _resampled_percent(algorithm: AlgorithmSpec) -> int:
    resample = None if algorithm.archer is None else algorithm.archer.resample
    return 0 if resample is None else resample.share_percent
