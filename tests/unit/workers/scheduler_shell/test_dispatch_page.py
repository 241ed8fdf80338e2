"""What `/numbers` says of dispatch."""

import pytest

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.measured import Curves, fitted
from streamrl_workers.scheduler.dispatch.policy import DISTRUST, Plan
from streamrl_workers.scheduler.shell.dispatch_page import dispatch_numbers
from streamrl_workers.scheduler.shell.signal_pages import Numbers
from streamrl_workers.scheduler.shell.switchboard import Switchboard
from support.core_world import STEEP, World, settings


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (Curves().curve("p", slots=8), {"speed": "guessed", "step_s": {}}),
        (fitted([(6, 0.3, 1.0)], slots=6), {"speed": "upperHalf", "step_s": {"1": pytest.approx(0.175), "6": 0.3}}),
        (LatencyCurve((1, 8), (0.1, 0.2)), {"speed": "known", "step_s": {"1": 0.1, "8": 0.2}}),
    ],
)
def test_how_fast_pools_are_taken_to_be(curve, said):
    assert dispatch_numbers(DISTRUST, {"p": curve})["pools"] == {"p": said}


def test_the_plan_and_why():
    plan = Plan(longest_first=True, tail_generators=frozenset({"b", "a"}), why="it pays")
    page = dispatch_numbers(plan, {})
    assert page == {"why": "it pays", "longest_first": True, "tail_generators": ["a", "b"], "pools": {}}


def test_a_scheduler_says_it(tmp_path):
    world = World(settings())
    world.join_generator("g0")
    world.join_generator("g1", pool="q")
    numbers = Numbers(world.core, switchboard=Switchboard(), run_dir=tmp_path)
    page = numbers.numbers()["dispatch"]
    numbers.close()
    assert page["why"].startswith("in the order of planning")
    assert page["pools"]["p"]["step_s"] == {
        str(batch): seconds for batch, seconds in zip(STEEP.batches, STEEP.seconds, strict=True)
    }
    assert page["pools"]["q"]["speed"] == "guessed"
