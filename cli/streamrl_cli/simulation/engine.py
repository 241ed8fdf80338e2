"""Continuous batching, by events instead of tokens. Pure: instants are parameters.

With a sequences active and K tokens of context in the batch, one decoding step takes

    tau(a, K) = PTL(a) + c K          PTL by `streamrl.latency.LatencyCurve`, c seconds a token of context

and adds a tokens to K. As long as a stays, n steps take n (PTL(a) + c K) + c a n^2 / 2 seconds (c a n (n - 1) / 2 to
the token; n is not whole here). So nothing has to happen between two ends of sequences: `made` counts decoding steps
since the start, and a sequence that joins at `made` m and has L tokens to go ends at m + L.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from streamrl.latency import LatencyCurve
from streamrl.spec.base import parse_bytes
from streamrl_cli.simulation.scenario import ScenarioPool
from streamrl_workers.metrics.bubbles import WallState, generating
from streamrl_workers.metrics.step_times import StepCounts, bucket_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolModel:
    """What all replicas of a pool have in common: times, and the states that the bubble clock knows."""

    name: str
    slots: int
    step_s: Sequence[float]
    """Seconds of a decoding step at 0 .. slots active sequences."""
    kv_s: float
    """Seconds that a token of context adds to a decoding step."""
    cluster: str
    """Name of another cluster than the trainer's; "": it is the trainer's."""
    weight_bytes: int
    """Of one version."""
    bandwidth: float
    """Bytes a second at which one version comes; in another cluster at most."""
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
            cluster=pool.cluster_name or "",
            weight_bytes=weight_bytes,
            bandwidth=math.inf if pool.bandwidth is None else parse_bytes(pool.bandwidth),
            load_s=pool.load_seconds,
            link_s=pool.link_seconds,
            start_s=pool.start_seconds,
            cost_per_hour=float(pool.cost_per_hour),
            queued_states=[generating(active=a, slots=pool.slots, waiting=True) for a in active],
            lonely_states=[generating(active=a, slots=pool.slots, waiting=False) for a in active],
        )


class ModelledEngine:
    """The active sequences of one replica."""

    def __init__(self, step_s: Sequence[float], *, kv_s: float) -> None:
        """New and empty.

        Args:
            step_s: seconds of a decoding step at 0 .. slots active sequences.
            kv_s: seconds that a token of context adds to a decoding step.
        """
        self._step_s = step_s
        self._kv_s = kv_s
        self._kv_tokens = 0.0
        self._now_s = 0.0
        self._buckets = [0, *(bucket_of(active) for active in range(1, len(step_s)))]
        """By active sequences."""
        self._counts: dict[int, list[float]] = {}
        """Bucket -> steps, tokens, seconds, since the start."""
        self._told: dict[int, StepCounts] = {}
        """The same as it was last told, but for the buckets that have grown since."""
        self._paused = False
        self._ends: list[tuple[float, int]] = []
        """(`made` at its end, lease); those of sequences that have left are skipped."""
        self._active: dict[int, tuple[float, float]] = {}
        """Lease -> (`made` at its end, context at its end)."""
        self.made = 0.0
        """Decoding steps since the start."""
        self.revision = 0
        """Rises when the next end may be another."""

    def __len__(self) -> int:
        return len(self._active)

    def advance(self, now_s: float) -> None:
        """Time has gone by; no sequence ends before `now_s`."""
        elapsed_s = now_s - self._now_s
        self._now_s = now_s
        if elapsed_s > 0 and self._active and not self._paused:
            self._go_on(self._steps_in(elapsed_s), seconds=elapsed_s)

    def admit(self, lease: int, *, tokens: int, context: int) -> None:
        """A sequence with so many tokens to go begins, at the moment of the last `advance`."""
        end = self.made + tokens
        self._active[lease] = (end, context + tokens)
        self._kv_tokens += context
        heappush(self._ends, (end, lease))
        self.revision += 1

    def cancel(self, lease: int) -> None:
        """A sequence leaves before its end, at the moment of the last `advance`."""
        self._drop(lease, left=self._active[lease][0] - self.made)

    def pause(self, *, paused: bool) -> None:
        """Stop or go on, at the moment of the last `advance`."""
        self._paused = paused
        self.revision += 1

    def next_end_s(self) -> float | None:
        """When the next sequence ends if nothing changes; None: none will."""
        ends = self._ends
        while ends and ends[0][1] not in self._active:
            heappop(ends)
        if not ends or self._paused:
            return None
        return self._now_s + self._seconds_of(ends[0][0] - self.made)

    def end(self, now_s: float) -> list[int]:
        """The time of `next_end_s` has come: who ends now, oldest first."""
        ends = self._ends
        target = ends[0][0]
        self._go_on(target - self.made, seconds=now_s - self._now_s)
        self.made = target  # exactly, whatever rounding said
        self._now_s = now_s
        ended = []
        while ends and ends[0][0] <= target:
            lease = heappop(ends)[1]
            if lease in self._active:
                ended.append(lease)
        for lease in ended:
            self._drop(lease, left=0.0)
        return ended

    def step_times(self, *, unit: int) -> dict[int, StepCounts]:
        """What a generator's heartbeat says of its steps, in steps of so many tokens of each sample."""
        for bucket, (steps, tokens, seconds) in self._counts.items():
            if bucket not in self._told:
                self._told[bucket] = StepCounts(steps / unit, tokens / unit, seconds)
        return dict(self._told)

    # ---- inside

    def _drop(self, lease: int, *, left: float) -> None:
        _, context = self._active.pop(lease)
        self._kv_tokens = self._kv_tokens - context + left if self._active else 0.0
        self.revision += 1

    def _go_on(self, steps: float, *, seconds: float) -> None:
        active = len(self._active)
        bucket = self._buckets[active]
        count = self._counts.get(bucket)
        if count is None:
            count = self._counts[bucket] = [0.0, 0.0, 0.0]
        count[0] += steps
        count[1] += steps * active
        count[2] += seconds
        self._told.pop(bucket, None)
        self.made += steps
        self._kv_tokens += steps * active

    def _seconds_of(self, steps: float) -> float:
        active = len(self._active)
        one_s = self._step_s[active] + self._kv_s * self._kv_tokens
        return steps * (one_s + self._kv_s * active * steps / 2)

    def _steps_in(self, seconds: float) -> float:
        active = len(self._active)
        one_s = self._step_s[active] + self._kv_s * self._kv_tokens
        if not self._kv_s:
            return seconds / one_s
        return 2 * seconds / (one_s + math.sqrt(one_s * one_s + 2 * self._kv_s * active * seconds))
