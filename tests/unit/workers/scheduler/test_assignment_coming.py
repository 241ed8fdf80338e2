"""Who is first does not take everything: shares of generators that still load, batches that are planned in portions."""

from collections import deque
from typing import Any

import pytest

from streamrl_workers.metrics.step_times import Steps, bucket_of
from streamrl_workers.scheduler.fleet import LOAD_GRACE_S
from streamrl_workers.scheduler.lengths import Lengths, prompt_key
from streamrl_workers.scheduler.prompts import PORTION
from support.core_world import KnownLengths, World, settings
from support.sure_lengths import SureLengths

GROUPS, GROUP_SIZE = 4, 2
SAMPLES = GROUPS * GROUP_SIZE


def ready(*names: str, slots: int, lengths: Lengths | None = None, **changes: Any) -> World:
    """Generators that have been told of the first weights and have not loaded them, and nothing to do yet."""
    job = settings(**{"evaluation_prompts": 0, "staleness": 0, "batch_groups": GROUPS, **changes})
    run = World(job, slots=(slots,), lengths=lengths or KnownLengths())
    asked, run.prompts = run.prompts, deque()
    run.start_trainer()
    for name in names:
        run.join_generator(name)
    while run.trainer.inbox:
        run.deliver_trainer()
    run.commit(100)
    while run.trainer.inbox:
        run.deliver_trainer()
    deliver(run)
    run.prompts = asked
    return run


def plan(run: World) -> None:
    while run.prompts:
        run.deliver_prompts()


def deliver(run: World) -> None:
    for generator in run.generators.values():
        while generator.inbox:
            run.deliver_generator(generator)


def load(run: World, name: str) -> None:
    run.load_weights(run.generators[name])


def held(run: World) -> dict[str, int]:
    """Samples that each generator holds."""
    deliver(run)
    return {name: len(generator.active) for name, generator in run.generators.items()}


def test_a_share_is_kept_for_who_still_loads() -> None:
    run = ready("g0", "g1", slots=SAMPLES)
    plan(run)
    load(run, "g0")
    assert held(run) == {"g0": SAMPLES // 2, "g1": 0}
    load(run, "g1")
    assert held(run) == {"g0": SAMPLES // 2, "g1": SAMPLES // 2}


@pytest.mark.parametrize("end", ["late", "failed", "gone"])
def test_nobody_is_waited_for_in_vain(end: str) -> None:
    run = ready("g0", "g1", slots=SAMPLES)
    plan(run)
    load(run, "g0")
    if end == "late":
        run.now_s += 2 * LOAD_GRACE_S
        run.do(run.core.tick(run.now_s))
    elif end == "failed":
        run.fail_weights(run.generators["g1"])
    else:
        run.kill_generator("g1")
    assert held(run)["g0"] == SAMPLES


def test_where_samples_queue_nothing_is_kept() -> None:
    run = ready("g0", "g1", slots=SAMPLES // 2)
    plan(run)
    load(run, "g0")
    assert held(run) == {"g0": SAMPLES // 2, "g1": 0}
    load(run, "g1")
    assert held(run) == {"g0": SAMPLES // 2, "g1": SAMPLES // 2}


def test_who_may_begin_under_the_version_that_it_has_is_not_waited_for() -> None:
    run = ready("g0", slots=SAMPLES, staleness=1)
    load(run, "g0")
    run.join_generator("g1")  # with no weights, and told of them alone
    plan(run)
    assert held(run)["g0"] > 0
    load(run, "g1")
    assert sum(held(run).values()) == 2 * SAMPLES


def test_nothing_of_a_batch_begins_before_all_of_it_is_planned() -> None:
    """Else the longest of its first portion would begin before those of the others."""
    groups = PORTION + 36
    run = ready("g0", slots=8, batch_groups=groups, prompt_look_ahead=2 * groups)
    load(run, "g0")
    plan(run)
    assert (held(run), run.core.view().waiting_samples) == ({"g0": 0}, PORTION * GROUP_SIZE)
    run.commit(10 * groups)  # brings the rest
    assert (held(run), run.core.view().waiting_samples) == ({"g0": 8}, groups * GROUP_SIZE - 8)


@pytest.mark.parametrize("first", ["g0", "g1"])
def test_who_loads_first_does_not_get_all_of_the_longest(first: str) -> None:
    run = ready("g0", "g1", slots=4, lengths=SureLengths(), dispatch="lateBinding", batch_groups=12)
    for name in ("g0", "g1"):
        for steps in (0, 1000, 2000):
            reading = {bucket_of(batch): Steps(steps, batch * steps, 0.01 * steps) for batch in (1, 2, 4)}
            run.do(run.core.generator_alive(name, now_s=run.now_s, reading=reading))
    plan(run)
    assert run.core.plan.longest_first, run.core.plan.why
    load(run, first)
    held(run)
    load(run, "g1" if first == "g0" else "g0")
    assert held(run) == {"g0": 4, "g1": 4}
    by_length = sorted(range(12), key=lambda group: (-(prompt_key(f"train {group % 5}") % 97), group))
    taken = {name: {request.group_id for request in one.active.values()} for name, one in run.generators.items()}
    assert taken == {"g0": {by_length[0], by_length[2]}, "g1": {by_length[1], by_length[3]}}
