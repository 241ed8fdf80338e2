"""Sides of a plan: what an idle generator is told when it may cross, and where begun groups go on."""

from collections import deque

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.scheduling import SkewAware
from streamrl_workers.scheduler.dispatch import replanning
from support.core_world import KnownLengths, World, settings


def started(*, slots: int, loaded: tuple[str, ...] = ("g0", "g1"), **changes) -> World:
    """Two generators under static sides, g0 for the tail, and five groups of two samples planned for each step."""
    values = {
        "dispatch": "skewAware",
        "dispatch_options": SkewAware(),
        "batch_groups": 5,
        "evaluation_prompts": 0,
        "staleness": 0,
        "prompt_look_ahead": 64,
    }
    run = World(settings(**{**values, **changes}), slots=(slots,), lengths=KnownLengths())
    asked, run.prompts = run.prompts, deque()
    run.start_trainer()
    for name in ("g0", "g1"):
        run.join_generator(name)
    while run.unsynced or run.trainer.inbox:
        run.commit(100)
        if run.trainer.inbox:
            run.deliver_trainer()
    deliver(run)
    for name in loaded:
        run.load_weights(run.generators[name])
    run.prompts = asked
    while run.prompts:
        run.deliver_prompts()
    assert run.core.plan.tail_generators == {"g0"}
    deliver(run)
    return run


def deliver(run: World) -> dict[str, list[bool]]:
    """Every command; what each generator was told of the queue."""
    told: dict[str, list[bool]] = {}
    for generator in run.generators.values():
        while generator.inbox:
            if generator.inbox[0].HasField("queue"):
                told.setdefault(generator.name, []).append(generator.inbox[0].queue.waiting)
            run.deliver_generator(generator)
    return told


def groups_of(run: World, name: str) -> set[int]:
    return {request.group_id for request in run.generators[name].active.values()}


def fail_one(run: World, name: str) -> int:
    """A generator says something impossible of one sample, which is taken from it; its group."""
    lease, request = next(iter(run.generators[name].active.items()))
    broken = pb.Progress(lease=lease, tokens=bytes(4))
    run.do(run.core.generator_progress(name, items=[broken], now_s=run.now_s))
    deliver(run)
    return request.group_id


def test_one_that_would_cross_is_told_what_really_keeps_it_from_it():
    run = started(slots=12, loaded=("g0",), staleness=1, max_buffer_bytes=1)
    run.fail_weights(run.generators["g1"])  # nobody serves the rest
    idle = run.generators["g0"]
    deliver(run)
    assert len(idle.active) == 12
    run.make_token(idle, min(idle.active), finish="stop")
    told = deliver(run)
    assert run.core.view().waiting_samples == 8
    assert idle.idle == "back_pressure"
    assert False not in told.get("g0", []), "its free slot is no skew: something waits that it may take"


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_one_that_can_load_no_weights_keeps_no_groups_from_the_other(staleness):
    run = started(slots=12, loaded=("g0",), staleness=staleness)
    assert len(run.generators["g0"].active) < 10
    run.fail_weights(run.generators["g1"])
    deliver(run)
    assert len(run.generators["g0"].active) >= 10


def test_one_whose_side_is_done_is_told_so_while_the_other_side_is_served():
    run = started(slots=4)
    assert run.core.view().waiting_samples > 0
    assert run.generators["g0"].idle == "no_prompts"


def test_a_begun_group_goes_on_on_its_side_though_the_other_is_emptier():
    run = started(slots=4)
    others = run.generators["g1"]
    while others.active:
        run.make_token(others, min(others.active), finish="stop")
        deliver(run)
    assert not run.core.view().waiting_samples
    group = fail_one(run, "g0")
    assert groups_of(run, "g0") == {group}
    assert not others.active


@pytest.mark.parametrize("name", ["g0", "g1"])
def test_a_begun_group_goes_on_on_the_other_side_at_once_when_nobody_of_its_own_has_room(name, monkeypatch):
    monkeypatch.setattr(replanning, "FLEET_SHARE", 1)  # the plan outlives the generator
    run = started(slots=4)
    lost = groups_of(run, name)
    (other,) = {"g0", "g1"} - {name}
    while run.generators[other].active:
        run.make_token(run.generators[other], min(run.generators[other].active), finish="stop")
        deliver(run)
    run.kill_generator(name)
    deliver(run)
    assert run.core.plan.tail_generators == {"g0"}
    assert groups_of(run, other) & lost
