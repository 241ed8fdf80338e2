"""Every door is tried with hostile inputs: with those that are kept in each run of the tests, with new ones in `make soak`.

STREAMRL_FUZZ_SECONDS  CPU seconds for new inputs, all doors together (1800)     STREAMRL_FUZZ_SEED  where the search begins (by the clock)
STREAMRL_FUZZ_KEEP=1   keep an input of each new way of being taken; findings are always kept
"""

import gc
import os
import time

import pytest

from fuzz.doors import DOORS
from fuzz.harness import Door, keep, kept, search, try_one

BUDGET_S = float(os.environ.get("STREAMRL_FUZZ_SECONDS", "1800"))
SEED = int(os.environ.get("STREAMRL_FUZZ_SEED", "0")) or time.time_ns() % 10**9
FOUND_WITHIN_S = 300.0
"""Of CPU."""
_STUCK_TIMES = 10
"""A busy machine gives a search a part of its cores; beyond this many times its CPU it hangs."""

doors = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)


@doors
def test_what_is_kept_is_held(door: Door) -> None:
    gc.collect()  # of earlier tests: an input that nests deeply leaves no stack for what they would do at their end
    with door.opened() as enter:
        assert all(try_one(door, enter, data) for data in (*door.honest, *kept(door)))


@pytest.mark.soak
@pytest.mark.timeout(_STUCK_TIMES * BUDGET_S / len(DOORS) + 600)
@doors
def test_new_inputs_are_held(door: Door) -> None:
    seeds, keep_new = [*door.honest, *kept(door)], "STREAMRL_FUZZ_KEEP" in os.environ
    found = search(door, seeds=seeds, budget_s=BUDGET_S / len(DOORS), seed=SEED, keep_new=keep_new)
    if found is not None:
        pytest.fail(f"kept as {keep(door, found.data)}, seed {SEED}: {found}")


@pytest.mark.soak
@pytest.mark.timeout(_STUCK_TIMES * FOUND_WITHIN_S + 600)
@doors
def test_a_missing_bound_is_found(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    door.plant(monkeypatch)
    found = search(door, seeds=door.honest, budget_s=FOUND_WITHIN_S, seed=SEED, shorten=False)
    assert found is not None, f"seed {SEED}"
