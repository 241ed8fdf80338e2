"""The wall partition: its parts add up after any sequence, and the skew rule is the design's."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UserError
from streamrl.metrics import GENERATOR, TRAINER_RANK, worker_labels
from streamrl.spec.rljob import Metadata
from streamrl_workers.metrics.bubbles import (
    CAUSES,
    PARTS,
    BubbleSink,
    GeneratorState,
    ProcessWall,
    Recorder,
    WallPartition,
    WallState,
    bubble_ratios,
    generating,
    generator_wall,
    idle,
)
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.metrics.signals import WallMetrics
from support.metric_pages import series

LABELS = worker_labels(Metadata(name="job"), role="generator", process="g", pool="p")
SLOTS = 64

_states = st.one_of(
    st.sampled_from(PARTS).map(lambda part: WallState(part=part)),
    st.sampled_from([*CAUSES, "no_weights", "ended", "nonsense"]).map(idle),
    st.builds(generating, active=st.integers(1, SLOTS), slots=st.just(SLOTS), waiting=st.booleans()),
)


@given(
    begin_s=st.floats(-1e6, 1e6),
    steps=st.lists(st.tuples(_states, st.floats(0, 1e4)), max_size=200),
)
def test_parts_add_up_to_the_wall(begin_s, steps):
    now_s = begin_s
    partition = WallPartition(now_s=now_s)
    for state, elapsed_s in steps:
        partition.enter(state, now_s=now_s)
        now_s += elapsed_s
        parts = partition.parts(now_s=now_s)
        assert set(parts) == set(PARTS)
        assert all(seconds >= 0 for seconds in parts.values())
        assert math.isclose(
            math.fsum(parts.values()), partition.wall_s(now_s=now_s), rel_tol=1e-12, abs_tol=1e-9 * (1 + abs(begin_s))
        )


@pytest.mark.parametrize(
    ("state", "busy", "skew"),
    [
        (generating(active=16, slots=64, waiting=False), 2.0, 6.0),
        (generating(active=16, slots=64, waiting=True), 8.0, 0.0),
        (generating(active=64, slots=64, waiting=False), 8.0, 0.0),
        (generating(active=1, slots=1, waiting=False), 8.0, 0.0),
    ],
)
def test_empty_slots_are_skew_only_when_nothing_waits(state, busy, skew):
    partition = WallPartition(now_s=10.0)
    partition.enter(state, now_s=10.0)
    parts = partition.parts(now_s=18.0)
    assert (parts["busy"], parts["skew"]) == (busy, skew)


@pytest.mark.parametrize(
    ("cause", "part"),
    [(cause, f"pipeline_{cause}") for cause in CAUSES]
    + [("no_weights", "weights"), ("ended", "other"), ("", "other"), ("unheard_of", "other")],
)
def test_every_idle_cause_has_a_part(cause, part):
    assert idle(cause) == WallState(part=part)


def test_time_before_the_first_state_is_other():
    partition = WallPartition(now_s=0.0)
    partition.enter("busy", now_s=3.0)
    assert partition.parts(now_s=5.0)["other"] == 3.0
    assert partition.parts(now_s=5.0)["busy"] == 2.0


def test_ratios_are_weighted_by_cost():
    cheap = ProcessWall(wall_s=100.0, parts={"busy": 100.0}, cost_per_hour=1.0)
    dear = ProcessWall(wall_s=100.0, parts={"pipeline_staleness": 75.0, "skew": 25.0}, cost_per_hour=3.0)
    ratios = bubble_ratios([cheap, dear])
    assert ratios["busy"] == 0.25
    assert ratios["pipeline_staleness"] == ratios["pipeline"] == 0.5625
    assert ratios["skew"] == 0.1875
    assert math.isclose(sum(ratios[part] for part in PARTS), 1.0)


def test_ratios_of_nothing_are_zero():
    assert set(bubble_ratios([]).values()) == {0.0}
    assert set(bubble_ratios([])) == {*PARTS, "pipeline"}


def opened(path: Path, instance: str = "one") -> BubbleSink:
    return BubbleSink(path, process="generator-a-0", role="generator", instance=instance)


def test_a_line_has_every_part(tmp_path: Path):
    sink = opened(tmp_path / "metrics" / "g.jsonl")
    sink.write(t_s=100.5, wall_s=2.0, parts={"busy": 1.5, "other": 0.5})
    (record,) = read_jsonl(tmp_path / "metrics" / "g.jsonl")  # already there, without close
    assert list(record) == ["t", "process", "role", "instance", "wall_s", "parts"]
    assert list(record["parts"]) == list(PARTS)
    assert record["parts"]["busy"] == 1.5
    assert record["parts"]["skew"] == 0.0
    sink.close()


def test_a_restarted_process_appends_behind_a_torn_line(tmp_path: Path):
    path = tmp_path / "g.jsonl"
    first = opened(path, "one")
    first.write(t_s=1.0, wall_s=1.0, parts={})
    first.close()
    with path.open("a") as file:
        file.write('{"t": 2.0, "proc')  # killed while writing
    second = opened(path, "two")
    second.write(t_s=3.0, wall_s=1.0, parts={})
    second.close()
    assert [(s["t"], s["instance"]) for s in read_jsonl(path)] == [(1.0, "one"), (3.0, "two")]


def test_a_missing_file_has_no_samples(tmp_path: Path):
    assert list(read_jsonl(tmp_path / "none.jsonl")) == []


def test_an_unwritable_file_is_the_users_error(tmp_path: Path):
    (tmp_path / "metrics").write_text("a file where a folder is needed")
    with pytest.raises(UserError, match=r"metrics/g\.jsonl: cannot be written"):
        opened(tmp_path / "metrics" / "g.jsonl")


def test_a_full_disk_is_the_users_error():
    sink = opened(Path("/dev/full"))
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left on device"):
        sink.write(t_s=1.0, wall_s=1.0, parts={})
    sink.close()


def test_recorder_writes_cumulative_seconds_to_file_and_counters(tmp_path: Path):
    now = [1000.0]
    metrics = WallMetrics(GENERATOR, common=LABELS)
    sink = opened(tmp_path / "g.jsonl")
    recorder = Recorder(sink=sink, metrics=metrics, clock_s=lambda: now[0])
    now[0] += 2.0
    with recorder.during("busy"):
        now[0] += 3.0
    recorder.sample()
    recorder.enter("pipeline_staleness")
    now[0] += 4.0
    recorder.close()
    first, last = read_jsonl(tmp_path / "g.jsonl")
    assert (first["wall_s"], first["parts"]["busy"], first["parts"]["other"]) == (5.0, 3.0, 2.0)
    assert (last["wall_s"], last["parts"]["pipeline_staleness"]) == (9.0, 4.0)
    page = metrics.render()
    assert series(page, "streamrl_bubble_seconds_total", part="pipeline", cause="staleness", **LABELS) == 4
    assert series(page, "streamrl_wall_seconds_total", **LABELS) == 9


def test_counters_show_all_parts_from_the_start():
    page = WallMetrics(TRAINER_RANK, common=LABELS).render().decode()
    assert sum(line.startswith("streamrl_bubble_seconds_total{") for line in page.splitlines()) == len(PARTS)


def test_lines_are_json_of_plain_numbers(tmp_path: Path):
    sink = opened(tmp_path / "g.jsonl")
    sink.write(t_s=1.23456789, wall_s=1e-9, parts={"busy": 1 / 3})
    sink.close()
    (line,) = (tmp_path / "g.jsonl").read_text().splitlines()
    assert json.loads(line)["parts"]["busy"] == 0.333333


IDLE = GeneratorState(
    connected=True,
    usable=True,
    swapping=False,
    pulling=False,
    blocked=False,
    active=0,
    slots=8,
    queued=False,
    idle_cause="no_prompts",
)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, WallState(part="pipeline_no_prompts")),
        ({"connected": False}, WallState(part="other")),
        ({"connected": False, "active": 3, "usable": False}, WallState(part="other")),
        ({"usable": False}, WallState(part="weights")),
        ({"usable": False, "idle_cause": "staleness"}, WallState(part="weights")),
        ({"swapping": True, "active": 8}, WallState(part="weights")),
        ({"active": 2}, generating(active=2, slots=8, waiting=False)),
        ({"active": 2}, WallState(part="busy", skew_share=0.75)),
        ({"active": 2, "queued": True}, WallState(part="busy")),
        ({"active": 2, "pulling": True}, WallState(part="busy", skew_share=0.75)),
        ({"active": 2, "idle_cause": "staleness"}, WallState(part="busy", skew_share=0.75)),
        ({"active": 2, "blocked": True}, WallState(part="pipeline_back_pressure")),
        ({"idle_cause": "staleness"}, WallState(part="pipeline_staleness")),
        ({"idle_cause": "staleness", "pulling": True}, WallState(part="weights")),
        ({"idle_cause": "phase"}, WallState(part="pipeline_phase")),
        ({"idle_cause": "phase", "pulling": True}, WallState(part="weights")),
        ({"idle_cause": "no_weights"}, WallState(part="weights")),
        ({"idle_cause": "back_pressure", "pulling": True}, WallState(part="pipeline_back_pressure")),
        ({"idle_cause": "ended"}, WallState(part="other")),
    ],
)
def test_which_part_each_situation_of_a_generator_belongs_to(changes, state):
    assert generator_wall(dataclasses.replace(IDLE, **changes)) == state
