"""What the status endpoint and Prometheus say of length signals, the ranker and dispatch: all keys from the start, then the values."""

import math
from random import Random
from typing import Any

import pytest

from streamrl.latency import LatencyCurve
from streamrl_workers.scheduler.dispatch.order import IN_ORDER, Order, longest_in_batch
from streamrl_workers.scheduler.dispatch.speeds import Curves, fitted
from streamrl_workers.scheduler.dispatch.status import dispatch_status
from streamrl_workers.scheduler.lengths import LengthHistory, Lengths, prompt_key
from streamrl_workers.scheduler.lengths.status import length_status
from streamrl_workers.scheduler.server.connections import Connections
from streamrl_workers.scheduler.server.guests import status_parts
from streamrl_workers.scheduler.server.metrics_endpoint import SchedulerMetrics
from streamrl_workers.scheduler.server.ranker_client import RankerStatus
from streamrl_workers.scheduler.server.status_endpoint import StatusEndpoint
from support.core_world import STEEP, World, settings
from support.jobs import parsed_job
from support.metric_pages import series

NONE = RankerStatus()
UNUSED = Lengths(LengthHistory(), signals=())


def keys_of(page: object) -> object:
    return {key: keys_of(value) for key, value in page.items()} if isinstance(page, dict) else None


def learnt() -> Lengths:
    """A ranker that knows, after 300 groups."""
    draw = Random(0)
    tokens = [draw.randint(1, 1000) for _ in range(300)]
    lengths = Lengths(LengthHistory(), signals=("History", "Siblings", "Ranker"))
    lengths.ranked({prompt_key(str(number)): float(count) for number, count in enumerate(tokens)})
    for number, count in enumerate(tokens):
        key, prompt = prompt_key(str(number)), str(number)
        lengths.began(number, key=key)
        lengths.learn(key, tokens=[count], prompt=prompt, group_id=number)
    return lengths


def ranker_status(status: RankerStatus) -> Any:
    """What `/status` says of the ranker's process."""
    view = World(settings()).core.view()
    pages = [part.status(view) for part in status_parts(ranker=lambda: status)]
    return next(page["lengths"] for page in pages if "lengths" in page)["ranker"]


def test_the_key_set_is_stable() -> None:
    assert keys_of(length_status(UNUSED)) == keys_of(length_status(learnt()))


def test_numbers() -> None:
    page = length_status(learnt())
    assert page["trusted"] is True
    assert page["predictions"] == {"History": 0, "Siblings": 0, "Ranker": 300, "Nothing": 0}
    ranker, history = page["signals"]["Ranker"], page["signals"]["History"]
    assert (ranker["trusted"], ranker["pairs"], history["trusted"], history["pairs"]) == (True, 288, False, 0)
    assert ranker["recall"] > 0.9 > ranker["recall_lower"] > 0.7
    assert history["recall"] is None
    assert length_status(UNUSED)["trusted"] is False


def test_gauges() -> None:
    metrics = SchedulerMetrics(parsed_job(), process="scheduler")
    metrics.lengths(UNUSED, NONE)
    before = metrics.render()
    metrics.lengths(learnt(), NONE)
    after = metrics.render()
    assert series(before, "streamrl_length_trusted") == 0
    assert math.isnan(series(before, "streamrl_length_recall_lower_ratio", signal="Ranker"))
    assert series(after, "streamrl_length_trusted") == 1
    assert series(after, "streamrl_length_signal_trusted", signal="Ranker") == 1
    assert series(after, "streamrl_length_signal_trusted", signal="History") == 0
    assert series(after, "streamrl_length_pairs", signal="Ranker") == 288
    assert series(after, "streamrl_length_rank_correlation", signal="Ranker") > 0.9
    assert series(after, "streamrl_length_predictions_total", source="Ranker") == 300
    assert series(after, "streamrl_length_predictions_total", source="Nothing") == 0


def test_the_rankers_process_in_numbers_and_gauges() -> None:
    done = RankerStatus(
        state="ready",
        waiting=3,
        dropped=1,
        scored=40,
        deaths=2,
        pairs=500,
        rounds=4,
        cpu_s=9.5,
    )
    page = ranker_status(done)
    assert keys_of(page) == keys_of(ranker_status(NONE))
    assert ranker_status(NONE)["state"] == "none"
    assert page == {
        "state": "ready",
        "deaths": 2,
        "waiting": 3,
        "scored": 40,
        "dropped": 1,
        "pairs": 500,
        "rounds": 4,
        "cpu_s": 9.5,
    }
    metrics = SchedulerMetrics(parsed_job(), process="scheduler")
    metrics.lengths(UNUSED, done)
    text = metrics.render()
    assert series(text, "streamrl_ranker_rounds_total") == 4
    assert series(text, "streamrl_ranker_ready") == 1


# ---- dispatch


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (Curves().curve("p", slots=8), {"speed": "guessed", "step_s": {}}),
        (fitted([(6, 0.3, 1.0)], slots=6), {"speed": "known", "step_s": {"1": pytest.approx(0.175), "6": 0.3}}),
        (LatencyCurve((1, 8), (0.1, 0.2)), {"speed": "known", "step_s": {"1": 0.1, "8": 0.2}}),
    ],
)
def test_how_fast_pools_are_taken_to_be(curve, said):
    assert dispatch_status(IN_ORDER, {"p": curve})["pools"] == {"p": said}


def test_the_order_and_why():
    order = Order(key=longest_in_batch, long_generators=frozenset({"b", "a"}), why="it pays")
    page = dispatch_status(order, {})
    assert page == {"why": "it pays", "longest_first": True, "long_generators": ["a", "b"], "pools": {}}


def test_a_scheduler_says_it(tmp_path):
    world = World(settings())
    world.join_generator("g0")
    world.join_generator("g1", pool="q")
    status = StatusEndpoint(world.core, job=parsed_job(), connections=Connections(), run_dir=tmp_path)
    page = status.status()["dispatch"]
    status.close()
    assert page["why"].startswith("in the order of planning")
    assert page["pools"]["p"]["step_s"] == {
        str(batch): seconds for batch, seconds in zip(STEEP.batches, STEEP.seconds, strict=True)
    }
    assert page["pools"]["q"]["speed"] == "guessed"
