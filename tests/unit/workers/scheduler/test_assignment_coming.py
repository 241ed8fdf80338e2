"""Who is first does not take everything: shares of generators that still load, batches that are planned in portions."""

from collections import deque
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest

from streamrl_workers.metrics.step_times import StepCounts, bucket_of
from streamrl_workers.scheduler import rollout
from streamrl_workers.scheduler.generators import LOAD_GRACE_S
from streamrl_workers.scheduler.lengths import Lengths, prompt_key
from streamrl_workers.scheduler.planning import PORTION
from support.core_events import issued
from support.core_world import World, settings
from support.known_lengths import KnownLengths, SureLengths

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


def measure(run: World, **step_s: float) -> None:
    """Every pool's speed is known: seconds of a decoding step with b1, b2, ... samples."""
    for name in run.generators:
        for steps in (0, 1000, 2000):
            batches = {int(batch[1:]): seconds for batch, seconds in step_s.items()}
            reading = {bucket_of(batch): StepCounts(steps, batch * steps, s * steps) for batch, s in batches.items()}
            run.do(run.core.generator_alive(name, now_s=run.now_s, reading=reading))


@pytest.mark.parametrize("first", ["g0", "g1"])
def test_who_loads_first_does_not_get_all_of_the_longest(first: str) -> None:
    run = ready("g0", "g1", slots=4, lengths=SureLengths(), dispatch="longestFirst", batch_groups=12)
    measure(run, b1=0.01, b2=0.01, b4=0.01)
    plan(run)
    assert run.core.order.reorders, run.core.order.why
    load(run, first)
    held(run)
    load(run, "g1" if first == "g0" else "g0")
    assert held(run) == {"g0": 4, "g1": 4}
    by_length = sorted(range(12), key=lambda group: (-(prompt_key(f"train {group % 5}") % 97), group))
    taken = {name: {request.group_id for request in one.active.values()} for name, one in run.generators.items()}
    assert taken == {"g0": {by_length[0], by_length[2]}, "g1": {by_length[1], by_length[3]}}


GENERATORS = ("g0", "g1", "g2", "g3")


def taken_by(dispatch: str, *, before: Sequence[str], after: Sequence[str]) -> tuple[str, dict[str, set[int]]]:
    """How dispatch goes, and the groups that each generator has; it has loaded before the batch is planned, or after."""
    run = ready(*GENERATORS, slots=12, lengths=SureLengths(), dispatch=dispatch, batch_groups=5)
    measure(run, b1=0.01, b2=0.02, b4=0.04, b8=0.08, b16=0.16)
    for name in before:
        load(run, name)
    plan(run)
    for name in after:
        load(run, name)
        held(run)
    held(run)
    why = run.core.order.why
    return why, {name: {request.group_id for request in one.active.values()} for name, one in run.generators.items()}


@pytest.mark.parametrize("order", list(permutations(GENERATORS)))
def test_with_length_pools_it_does_not_matter_who_loads_first(order: Sequence[str]) -> None:
    why, together = taken_by("auto", before=order, after=())
    assert "length pools" in why
    assert taken_by("auto", before=(), after=order) == (why, together)
    assert sum(map(len, together.values())) == 5


def test_with_too_many_to_keep_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "MOST_KEPT", 4)
    run = ready("g0", "g1", slots=SAMPLES)
    plan(run)
    load(run, "g0")
    assert held(run) == {"g0": SAMPLES, "g1": 0}


def test_long_prompts_are_issued_in_portions(monkeypatch):
    """A thousand at once would hold up everything else."""
    monkeypatch.setattr(rollout, "ISSUE_PORTION_BYTES", 3 * len("train 0") - 1)
    run = ready("a", "b", slots=SAMPLES // 2)
    plan(run)
    sizes = []
    for name in ("a", "b"):
        run.core.weights_loaded(name, version=run.generators[name].wanted, now_s=0.0)
        while run.core.has_more:
            effects = run.core.resume()
            assert len(effects) <= 3, "no generator is told that it gets nothing while there is more"
            sizes.append(len(issued(effects)))
    assert sizes == [3, 1, 3, 1]
    assert not run.core.view().waiting_samples
