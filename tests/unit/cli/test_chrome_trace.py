"""The trace file, and what a process did as spans."""

from pathlib import Path

import pytest

from streamrl_cli.reporting.chrome_trace import ChromeTrace
from streamrl_cli.reporting.run_trace import phases
from support.trace_file import assert_nested, processes, read_trace


def test_a_sample_takes_the_lowest_free_slot(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for at_s, begins, sample in [(0, True, 1), (1, True, 2), (2, False, 1), (2, True, 3), (4, False, 3), (5, False, 2)]:
        if begins:
            trace.began("g", (sample, 0), now_s=at_s)
        else:
            trace.ended("g", (sample, 0), tokens=7, now_s=at_s, step=4)
    trace.ended("g", (9, 0), tokens=None, now_s=6)  # it never began
    trace.instant("t", "version 1", at_s=3.5)
    trace.write(tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    spans = {event["name"]: (event["tid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert spans == {"1.0": (1, 0, 2e6), "3.0": (1, 2e6, 2e6), "2.0": (2, 1e6, 4e6)}
    assert all(event["args"] == {"tokens": 7, "step": 4} for event in events if event["ph"] == "X")
    assert set(processes(events).values()) == {"g", "t"}


def test_spans_of_a_track_that_overlap_are_found() -> None:
    assert_nested((1, 0), [(0, 10), (2, 4), (4, 10), (10, 12)])
    with pytest.raises(AssertionError):
        assert_nested((1, 0), [(0, 10), (2, 14)])


def test_a_second_begins_with_what_the_one_before_ended_with() -> None:
    grown = [
        (0.0, 1.0, {"busy": 0.25, "pipeline_no_samples": 0.75}),
        (1.0, 2.0, {"busy": 0.5, "pipeline_no_samples": 0.5}),
        (2.0, 3.0, {"busy": 1.0}),
        (5.0, 6.0, {"busy": 1.0}),
    ]
    assert list(phases(grown)) == [
        ("busy", 0.0, 0.25),
        ("pipeline_no_samples", 0.25, 1.5),
        ("busy", 1.5, 3.0),
        ("busy", 5.0, 6.0),
    ]
    assert list(phases([])) == []
