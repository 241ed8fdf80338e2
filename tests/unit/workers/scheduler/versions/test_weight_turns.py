"""When other clusters are told of a version: tables, what holds whatever happens, and the core's own words."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl_workers.scheduler.versions.turns import FADING, FIRST_PATIENCE_S, PATIENCE, WeightTurns
from support.core_world import World, settings

SAME = {"a": 8, "b": 8, "c": 8}


def told_in_turn(
    turns: WeightTurns, step: int, slots: Mapping[str, int], took_s: Mapping[str, float], at_s: float
) -> str:
    """Who is told of a version that comes at `at_s`; each has it after its seconds."""
    now_s, told = at_s, ""
    for _ in slots:
        turns.look((1, step), slots, now_s=now_s)
        for name in [name for name, turn in turns.view().items() if turn.state == "fetching"]:
            told += name
            now_s += took_s[name]
            turns.loaded(name, (1, step), now_s=now_s)
    return told


def with_known_links(took_s: Mapping[str, float], slots: Mapping[str, int] = SAME) -> WeightTurns:
    """All have versions 0 and 1; version 1 came at 0 s."""
    turns = WeightTurns()
    assert told_in_turn(turns, 0, slots, took_s, at_s=-10_000.0) == "abc"
    turns.look((1, 1), slots, holders=slots, now_s=0.0)
    return turns


@pytest.mark.parametrize(
    ("interval_s", "took_s", "slots", "told"),
    [
        (90, {"a": 30, "b": 30, "c": 30}, SAME, "abc"),
        (89, {"a": 30, "b": 30, "c": 30}, SAME, "ab"),
        (59, {"a": 30, "b": 30, "c": 30}, SAME, "a"),
        (29, {"a": 30, "b": 30, "c": 30}, SAME, "a"),  # the first is never left out
        (100, {"a": 50, "b": 20, "c": 30}, SAME, "bca"),
        (99, {"a": 50, "b": 20, "c": 30}, SAME, "bc"),
        (100, {"a": 50, "b": 20, "c": 30}, {"a": 32, "b": 8, "c": 8}, "abc"),  # most slots for a second of the link
        (60, {"a": 300, "b": 20, "c": 30}, SAME, "bc"),
        (40, {"a": 30, "b": 20, "c": 15}, SAME, "cb"),
    ],
)
def test_in_turn_and_none_that_comes_after_the_next_version(
    interval_s: float, took_s: dict[str, float], slots: dict[str, int], told: str
) -> None:
    turns = with_known_links(took_s, slots)
    assert told_in_turn(turns, 2, slots, took_s, at_s=interval_s) == told
    left_out = {name for name, turn in turns.view().items() if turn.state == "left_out"}
    assert left_out == set(slots) - set(told)


def test_who_is_left_out_is_tried_again_as_what_is_known_fades() -> None:
    took_s = {"a": 30.0, "b": 30.0, "c": 30.0}
    turns = with_known_links(took_s)
    told = [told_in_turn(turns, 2 + number, SAME, took_s, at_s=89.0 * (1 + number)) for number in range(4)]
    assert told == ["ab", "ca", "ba", "ca"]  # of equal ones not always the same is left out
    assert {name: turn.left_out_versions for name, turn in turns.view().items()} == {"a": 0, "b": 1, "c": 2}
    dear = {"a": 30.0, "b": 30.0, "c": 40.0}
    turns = with_known_links(dear)
    told = [told_in_turn(turns, 2 + number, SAME, dear, at_s=89.0 * (1 + number)) for number in range(8)]
    assert told[:7] == ["ab", "ab", "ab", "ab", "ab", "ab", "ca"]
    assert 40 * FADING**6 < 30 < 40 * FADING**5


def test_a_slow_link_of_its_own_holds_nobody_up_for_long() -> None:
    turns = with_known_links({"a": 10.0, "b": 10.0, "c": 10.0})
    assert turns.look((1, 2), SAME, now_s=100.0) == {"a"}
    assert turns.look((1, 2), SAME, now_s=100 + 10 * PATIENCE - 1) == {"a"}
    assert turns.look((1, 2), SAME, now_s=100 + 10 * PATIENCE) == {"a", "b"}
    turns.failed("b", now_s=125.0)
    assert turns.look((1, 2), SAME, now_s=125.0) == {"a", "b", "c"}
    assert {name: turn.version_s for name, turn in turns.view().items()} == {"a": 10, "b": 100, "c": 10}
    turns.loaded("b", (1, 2), now_s=140.0)  # it went on
    assert turns.view()["b"].version_s == 20


def test_nobody_is_left_out_once_the_next_version_is_late() -> None:
    turns = with_known_links({"a": 20.0, "b": 40.0, "c": 50.0})
    assert turns.look((1, 2), SAME, now_s=75.0) == {"a"}
    turns.failed("a", now_s=115.0)  # so no version comes after this one, unless others get it
    assert turns.look((1, 2), SAME, now_s=224.0) == {"a"}
    assert not turns.is_late(now_s=224.0)
    assert turns.is_late(now_s=225.0)  # the one before had come after 75 s
    assert turns.look((1, 2), SAME, now_s=225.0) == {"a", "b"}
    turns.loaded("b", (1, 2), now_s=265.0)
    assert turns.look((1, 2), SAME, now_s=265.0) == {"a", "b", "c"}


def test_who_never_gets_a_version_is_tried_last() -> None:
    turns, told = WeightTurns(), []
    for step in range(8):
        at_s = 75.0 * step
        turns.look((1, step), {"east": 8, "west": 8}, now_s=at_s)
        for passed_s in (20.0, 60.0, 74.0):
            now_s = at_s + passed_s
            for name in [name for name, turn in turns.view().items() if turn.state == "fetching"]:
                if name == "west":
                    turns.failed(name, now_s=now_s)
                elif passed_s == 60.0:
                    turns.loaded(name, (1, step), now_s=now_s)
            turns.look((1, step), {"east": 8, "west": 8}, now_s=now_s)
        told.append(turns.view()["east"].state)
    assert told[2:].count("told") == 5  # west is tried once more


def test_a_cluster_that_is_silent_keeps_what_is_known_and_takes_no_turn() -> None:
    turns = with_known_links({"a": 10.0, "b": 10.0, "c": 30.0})
    assert turns.look((1, 2), SAME | {"a": 0}, now_s=100.0) == {"b"}
    assert turns.view()["a"].version_s == 10


def test_a_slow_fetch_is_waited_for_by_nobody_else_and_not_begun_again() -> None:
    turns = with_known_links({"a": 10.0, "b": 10.0, "c": 10.0})
    assert turns.look((1, 2), SAME, now_s=100.0) == {"a"}
    assert turns.look((1, 3), SAME, now_s=200.0) == {"b"}
    turns.loaded("b", (1, 3), now_s=210.0)
    turns.look((1, 3), SAME, now_s=210.0)
    turns.loaded("c", (1, 3), now_s=220.0)
    assert turns.look((1, 3), SAME, now_s=299.0) == {"b", "c"}
    turns.loaded("a", (1, 2), now_s=300.0)
    assert turns.view()["a"].version_s == 200
    assert turns.look((1, 3), SAME, now_s=300.0) == {"b", "c"}
    assert turns.view()["a"].state == "left_out"


def test_nothing_is_known_at_first() -> None:
    turns = WeightTurns()
    assert turns.look((1, 0), SAME, now_s=0.0) == {"a"}
    assert turns.look((1, 0), SAME, now_s=FIRST_PATIENCE_S - 1) == {"a"}
    assert turns.look((1, 0), SAME, now_s=FIRST_PATIENCE_S) == {"a", "b"}


def test_who_has_the_version_or_is_gone_takes_no_turn() -> None:
    turns = WeightTurns()
    assert turns.look((1, 0), SAME, holders={"a"}, now_s=0.0) == {"a", "b"}
    assert turns.look((1, 0), {"a": 8, "c": 8}, now_s=1.0) == {"a", "c"}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["look", "look", "loaded", "failed", "version"]),
            st.sampled_from("abc"),
            st.sets(st.sampled_from("abc"), min_size=1),
            st.sampled_from([0.0, 1.0, 10.0, 100.0]),
        ),
        max_size=60,
    )
)
def test_turns_end_and_words_are_kept(events: list[tuple[str, str, set[str], float]]) -> None:
    turns, step, now_s = WeightTurns(), 0, 0.0
    told: frozenset[str] = frozenset()
    for what, name, present, passed_s in events:
        now_s += passed_s
        if what in ("loaded", "failed"):
            turns.loaded(name, (1, step), now_s=now_s) if what == "loaded" else turns.failed(name, now_s=now_s)
            continue
        before = told if what == "look" else frozenset()
        step += what == "version"
        slots = dict.fromkeys(sorted(present), 4)
        told = turns.look((1, step), slots, now_s=now_s)
        assert before & present <= told <= present
        left_out = {name for name, turn in turns.view().items() if turn.state == "left_out"}
        fetching = {name for name, turn in turns.view().items() if turn.state == "fetching"}
        assert turns.is_taken(now_s=now_s) or told | left_out | fetching == present
    for _ in SAME:  # nothing more happens but that fetches end
        for name in SAME:
            turns.failed(name, now_s=now_s)
        told = turns.look((1, step), SAME, now_s=now_s)
    assert told | {name for name, turn in turns.view().items() if turn.state == "left_out"} == set(SAME)


@pytest.mark.parametrize(("shares_uplink", "told"), [(False, "abc"), (True, "ab")])
def test_the_core_tells_other_clusters_in_turn(shares_uplink: bool, told: str) -> None:
    world = World(settings(shares_uplink=shares_uplink))
    world.clusters = {"b": "east", "c": "west"}
    for name in "abc":
        world.join_generator(name)
    world.start_trainer()
    world.progress_once()
    wanting = [name for name, one in sorted(world.generators.items()) if one.wanted or one.version or one.inbox]
    assert "".join(wanting) == told


def test_no_turn_is_given_to_who_is_ahead_of_a_trainer_that_went_back() -> None:
    world = World(settings(staleness=0, steps=4, evaluation_prompts=0, shares_uplink=True))
    world.clusters = {"a": "east", "b": "east"}
    world.start_trainer()
    for name in "ab":
        world.join_generator(name)
    while world.trainer.step < 2 or any(one.version != (1, 2) for one in world.generators.values()):
        world.progress_once()
    world.start_trainer()  # at step 0 again: generators have version 2 until they may load a newer one
    world.run_out()
    assert world.finished
