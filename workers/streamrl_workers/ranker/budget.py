"""How much CPU time may go into tuning.

    balance += share * wall seconds, up to BURST_S * share        balance -= CPU seconds of the process

Work may begin while the balance is not negative, and is paid for afterwards. So over any time of T seconds the process uses at most
share * (T + BURST_S) and what one piece of work costs. All of the process's CPU time is counted: scoring comes first and is never held
up, tuning gets what it leaves. Owns the sum; the clocks are parameters.
"""

from collections.abc import Callable

BURST_S = 2.0
"""Idle time is not saved up: a quiet minute must not become twelve seconds of a full core."""


class CpuBudget:
    """A share of one core."""

    def __init__(self, percent: float, *, wall_s: Callable[[], float], cpu_s: Callable[[], float]) -> None:
        """`percent` of one core, above 0; what the process has used so far is not counted."""
        assert percent > 0, "without a budget nothing is tuned"
        self._share = percent / 100
        self._wall_s = wall_s
        self._cpu_s = cpu_s
        self._seen_wall_s = wall_s()
        self._seen_cpu_s = cpu_s()
        self._balance_s = 0.0

    def wait_s(self) -> float:
        """Seconds until work may begin; 0: now."""
        wall_s, cpu_s = self._wall_s(), self._cpu_s()
        earned_s = self._share * (wall_s - self._seen_wall_s)
        self._balance_s = min(self._balance_s + earned_s, BURST_S * self._share) - (cpu_s - self._seen_cpu_s)
        self._seen_wall_s, self._seen_cpu_s = wall_s, cpu_s
        return max(0.0, -self._balance_s / self._share)
