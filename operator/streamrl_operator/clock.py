"""The two clocks of the operator, as one parameter."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorClock:
    """Wall time for what is written down, monotonic time for what is waited for."""

    now: Callable[[], datetime] = _utc
    monotonic: Callable[[], float] = time.monotonic


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds, as Lease and Event have it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
