"""A pool on the trainer's devices: when it is paused, what it gets, what becomes of what it holds."""

import pytest

from streamrl_workers.scheduler.extensions.device_sharing import TAKE_OVER_S
from support.core_events import Always, end_samples, read_inbox
from support.core_peers import is_evaluation
from support.core_world import World, settings

OWN, LENT = "own", "lent"


def world(*, slots: tuple[int, int], said: bool = True, **demands) -> World:
    """A run whose two generators have version 0; `said`: the trainer has said that it waits."""
    demands = {"staleness": 0, "evaluation_prompts": 0, "shared_pools": frozenset({LENT}), **demands}
    run = World(settings(**demands), slots=slots)
    run.pools = {LENT: LENT}
    if not said:
        run.can_wait = lambda: False
    run.start_trainer()
    for name in (OWN, LENT):
        run.join_generator(name)
    for _ in range(3):
        run.progress_some(Always(), pace=1.0, finish=0.0)
    return run


def deliver_one_group(run: World) -> None:
    """The generator with devices of its own ends one of the groups it holds."""
    group = next(iter(run.generators[OWN].active.values())).group_id
    for name in (OWN, LENT):
        end_samples(run, name, group=group)
    run.commit(100)
    assert run.core.view().delivered_groups == 1


def holds(run: World, name: str) -> int:
    read_inbox(run, name)
    return len(run.generators[name].active)


def test_it_gets_nothing_before_the_trainer_says_that_it_waits() -> None:
    run = world(slots=(2, 2), said=False)
    assert run.generators[LENT].paused
    assert (holds(run, OWN), holds(run, LENT)) == (2, 0)
    assert run.core.view().pools[LENT].idle["phase"] == 1
    run.say_it_waits()
    assert (holds(run, OWN), holds(run, LENT)) == (2, 2)
    assert not run.generators[LENT].paused


def test_it_is_paused_with_what_it_holds_while_the_trainer_has_a_group() -> None:
    run = world(slots=(2, 2))
    before = holds(run, LENT)
    deliver_one_group(run)
    assert (holds(run, LENT), run.generators[LENT].paused) == (before, True)
    while run.trainer.inbox:
        run.deliver_trainer()  # it takes the group, and trains with it
    assert run.generators[LENT].paused
    run.say_it_waits()
    read_inbox(run, LENT)
    assert not run.generators[LENT].paused
    run.run_out()


def test_a_word_that_crossed_a_group_on_its_way_says_nothing() -> None:
    run = world(slots=(2, 2))
    deliver_one_group(run)
    run.say_it_waits()  # it has not read of the group yet
    read_inbox(run, LENT)
    assert run.generators[LENT].paused


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_trainer_that_is_gone_needs_its_devices(*, comes_back: bool) -> None:
    run = world(slots=(2, 2))
    run.trainer.connected = False
    run.do(run.core.trainer_left())
    read_inbox(run, LENT)
    assert run.generators[LENT].paused
    if comes_back:
        run.run_out()


def test_a_lent_generator_that_dies_while_it_is_paused_leaves_its_samples_to_others() -> None:
    run = world(slots=(2, 4))
    held = holds(run, LENT)
    deliver_one_group(run)
    run.kill_generator(LENT)
    assert run.core.view().waiting_samples + holds(run, OWN) >= held
    run.run_out()


@pytest.mark.parametrize(
    ("demands", "own_slots", "pause_s", "moves"),
    [
        ({}, 12, TAKE_OVER_S, True),
        ({"told": False}, 12, TAKE_OVER_S, True),  # without a token they begin there
        ({}, 12, TAKE_OVER_S / 2, False),  # not all of its tokens may have been told
        ({}, 3, TAKE_OVER_S, False),  # no slot is free
        ({"by_number": True, "partial_rollouts": False}, 12, TAKE_OVER_S, False),
        ({"partial_rollouts": False}, 12, TAKE_OVER_S, True),  # the version is the same
    ],
)
def test_behind_a_long_pause_its_samples_go_to_free_slots(
    *, demands: dict[str, bool], own_slots: int, pause_s: float, moves: bool
) -> None:
    told = demands.get("told", True)
    run = world(slots=(own_slots, 2), batch_groups=4, **{key: value for key, value in demands.items() if key != "told"})
    held = holds(run, LENT)
    assert held == 2
    if told:
        for lease in list(run.generators[LENT].active):
            run.make_token(run.generators[LENT], lease, finish="")
    run.trainer.connected = False
    run.do(run.core.trainer_left())
    run.now_s += pause_s
    run.do(run.core.tick(run.now_s))
    assert (run.core.view().moved_samples, holds(run, LENT)) == ((2, 0) if moves else (0, held))
    run.run_out()


def test_held_out_answers_are_left_to_those_that_are_never_paused() -> None:
    run = world(slots=(1, 4), evaluation_prompts=3)
    read_inbox(run, OWN)
    assert not any(is_evaluation(request) for request in run.generators[LENT].active.values())
    assert any(is_evaluation(request) for request in run.generators[OWN].active.values())
    run.run_out()
