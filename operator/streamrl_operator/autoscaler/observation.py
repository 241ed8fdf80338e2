"""Reads what a policy must know from the scheduler's `/numbers` page.

Owns the meaning of that page for scaling. Does not own how it is fetched.
"""

from collections.abc import Mapping
from typing import Any

from streamrl.latency import LatencyCurve
from streamrl_operator.autoscaler.values import Clock, Observation, Replica

_IDLE = "pipeline"
"""Parts of the wall whose names begin so are idle time that another stage causes (docs/concepts.md, Bubbles)."""


def generator_name(pool: str, *, ordinal: int) -> str:
    """Name of a generator in the run, and of its pod."""
    return f"generator-{pool}-{ordinal}"


def observe(numbers: Mapping[str, Any] | None, *, pool: str, wanted: int, now_s: float) -> Observation | None:
    """The pool as the page shows it; None without a page, after the run's end, or if the page is not whole.

    Only ordinals below `wanted` count: one that is leaving is no replica any more.
    """
    if numbers is None or numbers.get("ended"):
        return None
    names = [generator_name(pool, ordinal=ordinal) for ordinal in range(wanted)]
    try:
        connected = {str(line["id"]): line for line in numbers["generators"]}
        trainer = numbers["trainer"]
        return Observation(
            at_s=now_s,
            attempt=int(numbers["attempt"]),
            step=int(numbers["step"]),
            waiting=int(numbers["queue"]),
            replicas=tuple(_replica(connected[name]) for name in names if name in connected),
            trainer=None if trainer is None else _clock(trainer),
            since_step_s=float(numbers["scaling"]["since_step_s"]),
            latency=_latency(numbers["dispatch"]["pools"].get(pool)),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _replica(line: Mapping[str, Any]) -> Replica:
    parts = line["bubbles"]
    return Replica(
        name=str(line["id"]),
        slots=int(line["slots"]),
        active=int(line["active"]),
        clock=_clock(line),
        tokens=float(line["tokens"]),
        busy_s=float(parts.get("busy", 0.0)),
        skew_s=float(parts.get("skew", 0.0)),
    )


def _latency(speed: Mapping[str, Any] | None) -> LatencyCurve | None:
    """The pool's decoding step by its batch, as measured; a guess or half a curve is none."""
    if speed is None or speed["speed"] != "known":
        return None
    points = sorted((int(batch), float(seconds)) for batch, seconds in speed["step_s"].items())
    return LatencyCurve(tuple(batch for batch, _ in points), tuple(seconds for _, seconds in points))


def _clock(line: Mapping[str, Any]) -> Clock:
    idle_s = sum(float(seconds) for part, seconds in line["bubbles"].items() if part.startswith(_IDLE))
    return Clock(wall_s=float(line["wall_s"]), idle_s=idle_s)
