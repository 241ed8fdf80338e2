"""What is read off: requests by the audit log, memory and CPU by the kernel, times of looks by the operator's own histogram."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

import psutil

from cluster.harness.audit import Use

WRITES = ("create", "update", "patch", "delete", "deletecollection")
_CREATED, _REFUSED = 201, 300


def moment() -> str:
    """Now, as the audit log writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds(begin: str, end: str) -> float:
    """Between two moments of the audit log."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def between(uses: Iterable[Use], begin: str, end: str) -> list[Use]:
    """Requests that arrived in a window."""
    return [use for use in uses if begin <= use.at <= end]


def is_write(use: Use) -> bool:
    """A write that was done; the Lease aside."""
    return use.verb in WRITES and use.code < _REFUSED and use.resource != "leases"


def is_made(use: Use, plurals: Sequence[str]) -> bool:
    """Whether it made an object of these kinds."""
    return use.code == _CREATED and use.resource in plurals


def rates(times: Sequence[str], *, begin: str, parts: int) -> list[float]:
    """Events a second in each of so many equal parts of the events."""
    ordered = sorted(times)
    ends = [begin, *(ordered[len(ordered) * part // parts - 1] for part in range(1, parts + 1))]
    return [len(ordered) / parts / max(seconds(*pair), 1e-6) for pair in pairwise(ends)]


def table(uses: Iterable[Use], *, per: int) -> list[tuple[str, str, int, float]]:
    """(verb, resource, requests, requests per job), the most first."""
    counted = Counter((use.verb, use.resource) for use in uses)
    return [(verb, resource, count, count / per) for (verb, resource), count in counted.most_common()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one process so far."""

    cpu_s: float
    rss_mb: float
    peak_mb: float


def child(module: str) -> int:
    """The child of this process that runs `python -m module`."""
    return next(process.pid for process in psutil.Process().children() if module in process.cmdline())


def usage(pid: int | None) -> Usage:
    """CPU and memory of a process that runs."""
    assert pid is not None, "it runs"
    process = psutil.Process(pid)
    spent, memory = process.cpu_times(), process.memory_info()
    with open(f"/proc/{pid}/status") as file:  # noqa: PTH123 - psutil has no peak
        peak_kb = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return Usage(cpu_s=spent.user + spent.system, rss_mb=memory.rss / 1e6, peak_mb=peak_kb * 1024 / 1e6)


Histogram = Mapping[float, float]
"""Upper bound in seconds -> looks that took no longer."""


def histogram(page: str, name: str) -> Histogram:
    """The buckets of one histogram of a Prometheus page."""
    begin = f'{name}_bucket{{le="'
    lines = [line.removeprefix(begin) for line in page.splitlines() if line.startswith(begin)]
    return {float(line.partition('"')[0]): float(line.rpartition(" ")[2]) for line in lines}


def quantile(after: Histogram, before: Histogram, share: float) -> float:
    """The bucket's upper bound below which `share` of the looks between the two readings are; interpolated inside of it."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    wanted, low, below = share * max(counts.values(), default=0.0), 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
