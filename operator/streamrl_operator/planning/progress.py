"""What the scheduler's /numbers page says of a run, as the job's status shows it.

Owns the meaning of the page for people. A page that is missing or not whole changes nothing; numbers are rounded, so that noise is
no write. When they are renewed: at most once in `resync_s` (`is_due`).
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from streamrl.spec import RLJobSpec
from streamrl.status import Bubbles, RLJobStatus
from streamrl_operator.planning.moments import seconds_since, stamp

_DIGITS = 4
"""Of rewards and rates."""
_PIPELINE = "pipeline"
"""Parts of the wall whose names begin so are idle time that another stage causes (docs/concepts.md, Bubbles)."""


def renewed(
    before: RLJobStatus, page: Mapping[str, Any] | None, *, spec: RLJobSpec, store: str, now: datetime, resync_s: float
) -> RLJobStatus:
    """The status with the page's numbers, if it is time and anything differs. `store`: the job's directory on the checkpoints' volume."""
    if page is None or not is_due(before, now=now, resync_s=resync_s):
        return before
    after = before.model_copy(update=_numbers(page, spec=spec, store=store))
    return before if after == before else after.model_copy(update={"progress_time": stamp(now)})


def is_due(before: RLJobStatus, *, now: datetime, resync_s: float) -> bool:
    """Whether the numbers may be written again."""
    since_s = seconds_since(before.progress_time, now=now)
    return since_s is None or since_s < 0 or since_s >= resync_s


def checkpoint_path(store: str, path: object) -> str | None:
    """Directory of a checkpoint on the checkpoints' volume; `path` is from `store`, the job's own directory there."""
    return f"{store}/{path}"[:_LONGEST_PATH] if isinstance(path, str) and path else None


_LONGEST_PATH = 1024
_LARGEST = 1e15
"""An API server takes no whole number above 64 bits; a page that says more is wrong."""


def rounded(value: object) -> float | None:
    """A number with `_DIGITS` digits; None if it is none."""
    number = _number(value)
    return None if number is None else float(f"{number:.{_DIGITS}g}")


def count(value: object) -> int | None:
    """A whole number that is not negative; None if it is none."""
    number = _number(value)
    return int(number) if number is not None and number >= 0 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= _LARGEST else None  # of a NaN this does not hold either


def _numbers(page: Mapping[str, Any], *, spec: RLJobSpec, store: str) -> dict[str, Any]:
    """Field of the status -> value; what the page does not say is left out."""
    rate = rounded(_at(page, "scaling", "all", "tokens_per_s"))
    found = {
        "attempt": count(page.get("attempt")),
        "step": count(page.get("step")),
        "reward": rounded(_at(page, "last_evaluation", "mean_reward")),
        "queue": count(page.get("queue")),
        "tokens_per_second": None if rate is None else max(rate, 0.0),
        "bubbles": bubbles(page, spec=spec),
        "checkpoint_path": checkpoint_path(store, _at(page, "checkpoint", "path")),
    }
    return {name: value for name, value in found.items() if value is not None}


def bubbles(page: Mapping[str, Any], *, spec: RLJobSpec) -> Bubbles | None:
    """Shares of the wall over the last heartbeats, each process weighed by what it costs; None while nothing is known."""
    weighed = [(float(spec.trainer.cost_per_hour), _at(page, "scaling", "trainer"))]
    for pool in spec.generators:
        generators = count(_at(page, "scaling", "pools", pool.name, "generators")) or 0
        parts = _at(page, "scaling", "pools", pool.name, "parts")
        weighed.append((generators * float(pool.cost_per_hour), parts))
    known = [(cost, parts) for cost, parts in weighed if cost > 0 and isinstance(parts, Mapping)]
    total = sum(cost for cost, _ in known)
    if total <= 0:
        return None
    pipeline = sum(cost * _share(parts, begin=_PIPELINE) for cost, parts in known) / total
    skew = sum(cost * _share(parts, begin="skew") for cost, parts in known) / total
    return Bubbles(pipeline_percent=_percent(pipeline), skew_percent=_percent(skew))


def _share(parts: Mapping[str, Any], *, begin: str) -> float:
    return sum(_number(share) or 0.0 for part, share in parts.items() if str(part).startswith(begin))


def _percent(share: float) -> float:
    return round(min(max(100 * share, 0.0), 100.0), 1)


def _at(page: Mapping[str, Any], *path: str) -> Any:  # noqa: ANN401 - plain data
    value: Any = page
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
