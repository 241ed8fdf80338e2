"""Bubble files: readable lines, stable keys, restarts and torn ends."""

import json
import time
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_workers.metrics.bubbles import PARTS
from streamrl_workers.metrics.prometheus import Metrics
from streamrl_workers.metrics.recorder import Clocks, Recorder
from streamrl_workers.metrics.sink import BubbleSink, Source, read_bubbles, read_jsonl


def source(instance: str = "one") -> Source:
    return Source(process="generator-a-0", role="generator", instance=instance)


def test_a_line_has_every_part(tmp_path: Path):
    sink = BubbleSink(tmp_path / "metrics" / "g.jsonl", source=source())
    sink.write(t_s=100.5, wall_s=2.0, parts={"busy": 1.5, "other": 0.5})
    (record,) = read_jsonl(tmp_path / "metrics" / "g.jsonl")  # already there, without close
    assert list(record) == ["t", "process", "role", "instance", "wall_s", "parts"]
    assert list(record["parts"]) == list(PARTS)
    assert record["parts"]["busy"] == 1.5
    assert record["parts"]["skew"] == 0.0
    sink.close()


def test_a_restarted_process_appends_behind_a_torn_line(tmp_path: Path):
    path = tmp_path / "g.jsonl"
    first = BubbleSink(path, source=source("one"))
    first.write(t_s=1.0, wall_s=1.0, parts={})
    first.close()
    with path.open("a") as file:
        file.write('{"t": 2.0, "proc')  # killed while writing
    second = BubbleSink(path, source=source("two"))
    second.write(t_s=3.0, wall_s=1.0, parts={})
    second.close()
    assert [(s.t_s, s.source.instance) for s in read_bubbles(path)] == [(1.0, "one"), (3.0, "two")]


def test_a_missing_file_has_no_samples(tmp_path: Path):
    assert list(read_bubbles(tmp_path / "none.jsonl")) == []


def test_an_unwritable_file_is_the_users_error(tmp_path: Path):
    (tmp_path / "metrics").write_text("a file where a folder is needed")
    with pytest.raises(UserError, match=r"metrics/g\.jsonl: cannot be written"):
        BubbleSink(tmp_path / "metrics" / "g.jsonl", source=source())


def test_a_full_disk_is_the_users_error():
    sink = BubbleSink(Path("/dev/full"), source=source())
    with pytest.raises(UserError, match="/dev/full: cannot be written: No space left on device"):
        sink.write(t_s=1.0, wall_s=1.0, parts={})
    sink.close()


def test_recorder_writes_cumulative_seconds_to_file_and_counters(tmp_path: Path):
    now = [1000.0]
    metrics = Metrics(role="generator", process="g")
    sink = BubbleSink(tmp_path / "g.jsonl", source=source())
    recorder = Recorder(sink=sink, metrics=metrics, clocks=Clocks(monotonic_s=lambda: now[0], unix_s=time.time))
    now[0] += 2.0
    with recorder.during("busy"):
        now[0] += 3.0
    recorder.sample()
    recorder.enter("pipeline_staleness")
    now[0] += 4.0
    recorder.close()
    first, last = read_bubbles(tmp_path / "g.jsonl")
    assert (first.wall_s, first.parts["busy"], first.parts["other"]) == (5.0, 3.0, 2.0)
    assert (last.wall_s, last.parts["pipeline_staleness"]) == (9.0, 4.0)
    page = metrics.render().decode()
    labels = '{cause="staleness",part="pipeline",process="g",role="generator"}'
    assert f"streamrl_bubble_seconds_total{labels} 4.0" in page
    assert 'streamrl_wall_seconds_total{process="g",role="generator"} 9.0' in page


def test_counters_show_all_parts_from_the_start():
    page = Metrics(role="trainer", process="t").render().decode()
    assert sum(line.startswith("streamrl_bubble_seconds_total{") for line in page.splitlines()) == len(PARTS)


def test_lines_are_json_of_plain_numbers(tmp_path: Path):
    sink = BubbleSink(tmp_path / "g.jsonl", source=source())
    sink.write(t_s=1.23456789, wall_s=1e-9, parts={"busy": 1 / 3})
    sink.close()
    (line,) = (tmp_path / "g.jsonl").read_text().splitlines()
    assert json.loads(line)["parts"]["busy"] == 0.333333
