"""One event runs through few modules of the scheduler's core: a reader can follow it."""

from collections.abc import Mapping

import pytest

from support.trips import SCHEDULER, WORKERS, MeasuredWorld, Trip, full, plain

MOST = {
    "generator_progress": Trip(10, 45),
    "scores_arrived": Trip(10, 35),
    "step_done": Trip(12, 84),
    "tick": Trip(9, 35),
    "committed": Trip(9, 35),
    "credit": Trip(8, 25),
}
"""Event -> maximum median trip in a plain job, in the scheduler's modules."""
WIDER = 1.5
"""Factor for a job with many features, and for modules of all packages of the workers."""


@pytest.fixture(scope="module")
def worlds() -> Mapping[str, MeasuredWorld]:
    return {"plain": plain(), "full": full()}


@pytest.mark.parametrize(
    ("world", "below", "factor"),
    [("plain", SCHEDULER, 1.0), ("plain", WORKERS, WIDER), ("full", SCHEDULER, WIDER), ("full", WORKERS, WIDER)],
)
def test_one_event_runs_through_few_modules(
    worlds: Mapping[str, MeasuredWorld], world: str, below: str, factor: float
) -> None:
    trips = worlds[world].medians(below)
    allowed = {name: Trip(most.modules * factor, most.moves * factor) for name, most in MOST.items()}
    found = {name: trips[name] for name in MOST}
    long = {n: t for n, t in found.items() if t.modules > allowed[n].modules or t.moves > allowed[n].moves}
    assert long == {}
