"""What all replicas of a pool have in common: times, and the states that the bubble clock knows. Pure values."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.latency import LatencyCurve
from streamrl.spec.base import parse_bytes
from streamrl_cli.simulation.scenario import ScenarioPool
from streamrl_workers.metrics.bubbles import WallState, generating


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """One pool."""

    name: str
    slots: int
    step_s: Sequence[float]
    """Seconds of a decoding step at 0 .. slots active sequences."""
    kv_s: float
    """Seconds that a token of context adds to a decoding step."""
    fetch_s: float
    """To fetch one version of the weights."""
    load_s: float
    link_s: float
    """One way between scheduler and replica."""
    start_s: float
    cost_per_hour: float
    queued_states: Sequence[WallState]
    """By active sequences from 1 on, while samples wait for a slot somewhere."""
    lonely_states: Sequence[WallState]
    """The same while none waits: empty slots are skew."""

    @classmethod
    def of(cls, pool: ScenarioPool, *, weight_bytes: int) -> "PoolModel":
        """Of a scenario's pool."""
        curve = LatencyCurve.of_milliseconds((point.batch, point.milliseconds) for point in pool.latency)
        active = range(1, pool.slots + 1)
        return cls(
            name=pool.name,
            slots=pool.slots,
            step_s=[curve.at(batch) for batch in range(pool.slots + 1)],
            kv_s=pool.kv_nanoseconds / 1e9,
            fetch_s=0.0 if pool.bandwidth is None else weight_bytes / parse_bytes(pool.bandwidth),
            load_s=pool.load_seconds,
            link_s=pool.link_seconds,
            start_s=pool.start_seconds,
            cost_per_hour=float(pool.cost_per_hour),
            queued_states=[generating(active=a, slots=pool.slots, waiting=True) for a in active],
            lonely_states=[generating(active=a, slots=pool.slots, waiting=False) for a in active],
        )
