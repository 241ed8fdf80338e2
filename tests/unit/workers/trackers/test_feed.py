"""What a tracker is still to be told, of a run folder that grows, goes back, and is read by one process after the other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.archive import ArchivePosition, ArchiveWriter
from streamrl_workers.trackers import feed as feed_module
from streamrl_workers.trackers.feed import NewPoints, TrackerFeed

EVAL = {"prompts": 8, "failed": 0, "mean_reward": 0.5}


class Folder:
    """A run folder as the scheduler writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / keys.DIR_METRICS).mkdir()
        self.archive = ArchiveWriter(path / keys.DIR_ARCHIVE, max_bytes=1 << 22, at=ArchivePosition())

    def write(self, name: str, *lines: dict[str, Any], end: str = "\n") -> None:
        with (self.path / keys.DIR_METRICS / f"{name}.jsonl").open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines[:-1]) + json.dumps(lines[-1]) + end)

    def steps(self, *numbers: int, attempt: int = 1) -> None:
        self.write("steps", *({"step": step, "attempt": attempt, "time_s": 1.0} for step in numbers))

    def evaluations(self, *numbers: int) -> None:
        self.write("evaluations", *(EVAL | {"step": step, "time_s": 1.0} for step in numbers))

    def archived(self, group_id: int, *, step: int | None) -> None:
        head = pb.ArchivedGroup(group_id=group_id, step=step)
        head.samples.extend(pb.ArchivedSample(reward=float(one), tokens=5 - one) for one in range(2))
        samples = [pb.Sample(reward=float(one), finish_reason="stop") for one in range(2)]
        texts = pb.GroupTexts(
            prompt=f"prompt {group_id}", samples=[pb.SampleTexts(turns=[f"turn {n}"]) for n in range(2)]
        )
        self.archive.append(head, pb.ArchivedSamples(samples=samples, texts=texts))
        self.archive.sync()

    def feed(self) -> TrackerFeed:
        return TrackerFeed(self.path, key="wandb", sample_interval_steps=2)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.archive.close()


def told(feed: TrackerFeed, *, final: bool = False) -> list[tuple[str, int]]:
    new: NewPoints = feed.new(final=final)
    feed.told(new.position)
    return [(point.kind, point.step) for point in new.points]


def test_each_line_is_told_once_also_by_a_later_process(folder: Folder) -> None:
    folder.evaluations(0)
    folder.steps(0, 1)
    feed = folder.feed()
    assert told(feed) == [("train", 1), ("train", 2), ("eval", 0)]
    assert told(feed) == []
    folder.write("steps", {"step": 2}, end="")
    assert told(feed) == [], "a line that is still being written"
    folder.write("steps", {}, {"step": 3})
    assert told(folder.feed()) == [("train", 4)], "the two halves make no line"


def test_what_was_not_brought_to_the_tracker_comes_again(folder: Folder) -> None:
    folder.steps(0)
    assert [point.step for point in folder.feed().new().points] == [1]
    assert told(folder.feed()) == [("train", 1)]


def test_a_step_that_is_trained_again_keeps_its_first_values(folder: Folder) -> None:
    folder.steps(0, 1, 2)
    feed = folder.feed()
    told(feed)
    folder.steps(1, 2, 3, attempt=2)
    folder.evaluations(2, 2)
    assert told(feed) == [("train", 4), ("eval", 2)]


def test_an_evaluation_waits_for_the_steps_behind_it_or_the_end(folder: Folder) -> None:
    folder.steps(0)
    folder.evaluations(0, 2)
    feed = folder.feed()
    assert told(feed) == [("train", 1), ("eval", 0)]
    assert told(feed) == []
    assert told(feed, final=True) == [("eval", 2)], "the line of its step was lost with a scheduler"


def test_a_long_run_comes_in_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_LINES", 3)
    folder.steps(*range(5))
    folder.evaluations(4, 5)
    feed = folder.feed()
    assert not feed.new(final=True).is_all
    assert told(feed, final=True) == [("train", 1), ("train", 2), ("train", 3)]
    assert told(feed, final=True) == [("train", 4), ("train", 5), ("eval", 4), ("eval", 5)]


def test_samples_of_due_steps_come_from_the_archive_once(folder: Folder) -> None:
    for group_id, step in enumerate((0, 1, None, 1, 2)):
        folder.archived(group_id, step=step)
    feed = folder.feed()
    new = feed.new()
    feed.told(new.position)
    assert list(new.tables) == [2]
    assert {row[5] for row in new.tables[2]} <= {"prompt 1", "prompt 3"}
    assert new.tables[2][0] == (2, "best", 1.0, 4, "stop", "prompt 1", "turn 1")
    assert new.tables[2][1][1:3] == ("worst, longest", 0.0)
    folder.archived(9, step=3)
    assert list(folder.feed().new(final=True).tables) == [4]


def test_a_table_is_of_all_groups_of_its_step(folder: Folder) -> None:
    """The archive grows by portions: a look may come in the middle of a step."""
    feed = folder.feed()
    for group_id, step in enumerate((1, None, 1)):
        folder.archived(group_id, step=step)
        new = feed.new()
        assert new.tables == {}
        feed.told(new.position)
    folder.archived(3, step=2)
    assert {row[5] for row in folder.feed().new().tables[2]} == {"prompt 0", "prompt 2"}


def test_after_a_long_absence_tables_come_in_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_TABLES", 2)
    for group_id in range(12):
        folder.archived(group_id, step=group_id // 2)
    found = []
    while True:
        feed = folder.feed()
        new = feed.new(final=True)
        feed.told(new.position)
        found.append(list(new.tables))
        if new.is_all:
            break
    assert found == [[2, 4], [6]]


def test_a_segment_that_was_just_begun_is_looked_at_later(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    folder.archived(0, step=1)
    begun = folder.path / keys.DIR_ARCHIVE / "segment-00000001"
    begun.touch()
    assert list(folder.feed().new(final=True).tables) == [2]
    assert caplog.text == ""


def test_a_damaged_archive_holds_up_the_tables_and_nothing_else(
    folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.archived(0, step=1)
    (segment,) = (folder.path / keys.DIR_ARCHIVE).iterdir()
    segment.write_bytes(b"x" * 100)
    folder.steps(0)
    feed = folder.feed()
    assert told(feed) == [("train", 1)]
    assert "samples are looked for again: " in caplog.text
    folder.steps(1)
    assert told(feed) == [("train", 2)]


def test_a_position_that_is_none_is_refused(folder: Folder) -> None:
    file = folder.path / keys.DIR_TRACKERS / "wandb.json"
    file.parent.mkdir()
    file.write_text('{"steps": "many"}')
    with pytest.raises(UserError, match="is not what was written"):
        folder.feed()
