"""Notices of silent processes: what is read in a folder that the user's code may write to."""

import json
import os
from pathlib import Path

from streamrl_workers.process.silences import MOST_CHARS, MOST_NOTICES, Silence, announce, forget, read_silences


def test_the_newest_notice_of_each_process_counts(tmp_path: Path) -> None:
    first, second = Silence(message="one", holds=True), Silence(message="two", holds=False)
    announce(tmp_path / "beats" / "a", first)
    announce(tmp_path / "beats" / "b", first)
    announce(tmp_path / "beats" / "a", second)
    assert list(read_silences([tmp_path / "beats", tmp_path / "none"]).values()) == [second, first]
    forget(tmp_path / "beats" / "a")
    assert list(read_silences([tmp_path / "beats"]).values()) == [first]


def test_what_is_no_notice_is_left_out_and_all_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "target").write_text(json.dumps({"message": "of a link", "holds": True}))
    (tmp_path / "a.silence").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "b.silence")
    (tmp_path / "c.silence").mkdir()
    for name, text in {"d": "no JSON", "e": "[]", "f": '{"message": 1, "holds": true}', "g": " " * 10_000}.items():
        (tmp_path / f"{name}.silence").write_text(text)
    assert read_silences([tmp_path]) == {}
    announce(tmp_path / "h", Silence(message="x" * 2000, holds=True))
    (found,) = read_silences([tmp_path]).values()
    assert found.message == "x" * MOST_CHARS
    for number in range(2 * MOST_NOTICES):
        announce(tmp_path / "many" / str(number), found)
    assert len(read_silences([tmp_path / "many"])) == MOST_NOTICES
