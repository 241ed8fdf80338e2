"""Per-token latency of each pool, as its generators' heartbeats show it.

    PTL(BS) = seconds / steps,      BS = tokens / steps        of the steps at like batches between two heartbeats

Owns the points and the curve fitted to them: moving means by batch bucket, made to rise with the batch by pooling
adjacent violators, and beyond what was seen continued in a default shape, so that a batch that nobody measured looks
neither free nor forbidden. Pure; a new scheduler measures anew. Prefill is part of what is measured: per-token times
here are those of the job's own mix.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from streamrl.latency import LatencyCurve
from streamrl_workers.metrics.step_times import StepCounts, bucket_of

MEMORY = 512
"""Steps of a bucket that count, roughly: samples get longer as training goes on, and steps with them slower."""
MIN_STEPS = 64
"""Of a pool, before its curve is used: the first ones often hold a warm-up."""
MIN_POINT_STEPS = 4
"""Of a bucket, before it is a point of the curve: a busy moment weighs too much in fewer."""
FULL_FACTOR = 2.0
"""Default shape: a step with all slots taken takes about so many times that of an empty batch."""
SHORTEST_STEP_S, LONGEST_STEP_S = 1e-9, 1e9
"""No engine's step is beyond them; numbers between them can be summed, multiplied and divided."""
_STALE_SHARE = 8
"""A curve is fitted again when an eighth more readings are there, and at least every 64."""
_MAX_STALE = 64

Reading = Mapping[int, StepCounts]
"""One heartbeat of one generator: bucket of batches -> its steps since its process began."""


def step_seconds(since: StepCounts) -> tuple[float, float] | None:
    """Mean batch and seconds of a decoding step of these; None if they tell nothing sure."""
    if not 0 < since.steps <= since.tokens < inf:
        return None
    step_s = since.seconds / since.steps
    return (since.tokens / since.steps, step_s) if SHORTEST_STEP_S <= step_s <= LONGEST_STEP_S else None


@dataclass(slots=True)
class _Bucket:
    """Moving means over the steps of similar batches."""

    batch: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    """Steps, up to MEMORY."""

    def add(self, batch: float, seconds: float, *, steps: float) -> None:
        self.weight = min(self.weight + steps, MEMORY)
        share = min(1.0, steps / self.weight)
        self.batch += (batch - self.batch) * share
        self.seconds += (seconds - self.seconds) * share


class PoolPoints:
    """What is known of one pool's speed."""

    def __init__(self) -> None:
        self.readings = 0
        self.steps = 0.0
        self._buckets: dict[int, _Bucket] = {}

    def add(self, batch: float, seconds: float, *, steps: float) -> None:
        """One reading, over so many steps."""
        self.readings += 1
        self.steps += steps
        bucket = self._buckets.setdefault(bucket_of(batch), _Bucket())
        bucket.add(batch, seconds, steps=steps)

    @property
    def known(self) -> bool:
        """Whether there is enough to use it."""
        return self.steps >= MIN_STEPS and any(bucket.weight >= MIN_POINT_STEPS for bucket in self._buckets.values())

    def points(self) -> list[tuple[float, float, float]]:
        """(batch, seconds, weight), by rising batch, each whole batch once."""
        found: dict[int, tuple[float, float]] = {}
        for bucket in self._buckets.values():
            if bucket.weight < MIN_POINT_STEPS:
                continue
            batch = max(1, round(bucket.batch))
            seconds, weight = found.get(batch, (0.0, 0.0))
            total = weight + bucket.weight
            found[batch] = ((seconds * weight + bucket.seconds * bucket.weight) / total, total)
        return [(batch, seconds, weight) for batch, (seconds, weight) in sorted(found.items())]


def rising(points: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """The nearest (weighted least squares) seconds that never fall with the batch: pool adjacent violators.

    Args:
        points: (batch, seconds, weight) by rising batch.
    """
    blocks: list[tuple[list[float], float, float]] = []
    for batch, value, mass in points:
        batches, seconds, weight = [batch], value, mass
        while blocks and blocks[-1][1] >= seconds:
            before, other_s, other = blocks.pop()
            seconds = (seconds * weight + other_s * other) / (weight + other)
            batches, weight = before + batches, weight + other
        blocks.append((batches, seconds, weight))
    return [(batch, seconds) for batches, seconds, _ in blocks for batch in batches]


def default_shape(batch: float, *, slots: int) -> float:
    """1 for an empty batch, rising evenly to FULL_FACTOR with all slots taken."""
    return 1.0 + (FULL_FACTOR - 1.0) * batch / slots


def fitted(points: Iterable[tuple[float, float, float]], *, slots: int) -> LatencyCurve:
    """A curve through the points; below the first and above the last of them it has the default shape.

    Args:
        points: (whole batch, seconds, weight) by rising batch, at least one.
        slots: of the generators it is for: the default shape is stretched over them.
    """
    known = rising(points)
    (first, first_s), (last, last_s) = known[0], known[-1]
    shape = partial(default_shape, slots=slots)
    below = [(1, first_s * shape(1) / shape(first))] if first > 1 else []
    above = [(slots, last_s * shape(slots) / shape(last))] if last < slots else []
    whole = [*below, *known, *above]
    return LatencyCurve(tuple(int(batch) for batch, _ in whole), tuple(seconds for _, seconds in whole))


class Guess(LatencyCurve):
    """A curve that nobody measured: it tells which generator is first served, no order of groups rests on it."""

    __slots__ = ()


class Curves:
    """The curve of each pool: given, measured, or guessed from the others."""

    def __init__(self, known: Mapping[str, LatencyCurve] | None = None) -> None:
        """`known`: pools whose curve was measured before the run; it holds until enough is measured in it."""
        self._known = dict(known or {})
        self._pools: dict[str, PoolPoints] = {}
        self._curves: dict[tuple[str, int], tuple[int, LatencyCurve]] = {}
        """(pool, slots) -> readings, of all pools for a guess, when it was made, curve."""
        self._readings = 0
        self.kinds = 0
        """Rises when a pool's curve gets known."""

    def observe(self, pool: str, *, before: Reading, now: Reading) -> None:
        """Two heartbeats of one generator of the pool."""
        for bucket, steps in now.items():
            known = before.get(bucket)
            if known is steps:
                continue
            since = steps if known is None else steps - known
            found = step_seconds(since)
            if found is not None:
                self._readings += 1
                self._pools.setdefault(pool, PoolPoints()).add(*found, steps=since.steps)

    def measured(self, pool: str) -> bool:
        """Whether enough is known of the pool to use it."""
        points = self._pools.get(pool)
        return points is not None and points.known

    def curve(self, pool: str, *, slots: int) -> LatencyCurve:
        """Seconds of a step by active samples, for the pool's generators with so many slots."""
        is_measured = self.measured(pool)
        if not is_measured and pool in self._known:
            return self._known[pool]
        seen, curve = self._curves.get((pool, slots), (0, None))
        readings = self._pools[pool].readings if is_measured else self._readings
        gets_known = is_measured and (curve is None or isinstance(curve, Guess))
        if curve is None or gets_known or readings - seen >= min(_MAX_STALE, max(1, seen // _STALE_SHARE)):
            self.kinds += gets_known
            curve = fitted(self._pools[pool].points(), slots=slots) if is_measured else self._guess(slots)
            self._curves[pool, slots] = (readings, curve)
        return curve

    def _guess(self, slots: int) -> LatencyCurve:
        """The default shape, as fast as the others are on average where others are known."""
        others = [name for name in sorted({*self._known, *self._pools}) if name in self._known or self.measured(name)]
        empty_s = [self.curve(name, slots=slots).at(1) for name in others]
        base_s = sum(empty_s) / len(empty_s) / default_shape(1, slots=slots) if empty_s else 1.0
        batches = (1,) if slots == 1 else (1, slots)
        return Guess(batches, tuple(base_s * default_shape(batch, slots=slots) for batch in batches))
