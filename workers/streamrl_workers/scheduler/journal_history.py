"""Which steps count: the effective history of a run with restarts. Pure.

An attempt that starts at step s takes back every step >= s of the attempts before it.
"""

from collections.abc import Iterable, Mapping


def effective_attempts(attempts: Iterable[tuple[int, int]], *, taken: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Step -> the attempt whose step counts.

    Args:
        attempts: (attempt, step that it started at).
        taken: (attempt, step) of every recorded step.
    """
    steps_by_attempt: dict[int, list[int]] = {}
    for attempt, step in taken:
        steps_by_attempt.setdefault(attempt, []).append(step)
    effective: dict[int, int] = {}
    for attempt, start in sorted(attempts):
        effective = {step: owner for step, owner in effective.items() if step < start}
        effective.update(dict.fromkeys(steps_by_attempt.get(attempt, ()), attempt))
    return dict(sorted(effective.items()))


def taken_back(effective: Mapping[int, int], *, taken: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Step -> newest attempt, for recorded steps behind the end of the effective history: they are done again."""
    end = max(effective, default=-1)
    return {step: attempt for attempt, step in sorted(taken) if step > end}
