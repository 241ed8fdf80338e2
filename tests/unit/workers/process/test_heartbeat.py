"""A heartbeat file and who watches it: by a clock of the test's own."""

import os
from pathlib import Path

from streamrl_workers.process.heartbeat import POLL_S, HeartbeatWatch

BOUND_S = 90.0


class Watched:
    """A watch, its file and its clock."""

    def __init__(self, file: Path) -> None:
        self.file, self.now_s, self.beats = file, 0.0, 0
        self.watch = HeartbeatWatch(name="trainer-0", file=file, bound_s=BOUND_S, looked_s=0.0)
        self.beat()

    def beat(self) -> None:
        self.beats += 1
        self.file.touch()
        os.utime(self.file, ns=(self.beats, self.beats))

    def pass_s(self, seconds: float, *, beats: bool = False) -> list[tuple[float, str]]:
        """Looks all the time; (second of the silence, line)."""
        said = []
        for _ in range(round(seconds / POLL_S)):
            self.now_s += POLL_S
            if beats:
                self.beat()
            if line := self.watch.look(self.now_s):
                said.append((self.watch.silent_s, line))
        return said


def test_a_word_at_a_third_of_the_bound_and_the_end_at_the_bound(tmp_path: Path) -> None:
    run = Watched(tmp_path / "beat")
    assert not run.pass_s(500, beats=True)
    (told_s, told), (killed_s, killed) = run.pass_s(BOUND_S + 5)
    assert (told_s, killed_s) == (30.0, 90.0)
    assert told.startswith("trainer-0 has shown no sign of life for 30 s, since ")
    assert told.endswith("; after 90 s it is killed and started again")
    assert killed.endswith(": it is killed")
    assert run.watch.frozen


def test_who_comes_back_in_time_is_told_and_spared(tmp_path: Path) -> None:
    run = Watched(tmp_path / "beat")
    for _ in range(3):
        assert len(run.pass_s(BOUND_S - 5)) == 1
        ((_, line),) = run.pass_s(5, beats=True)
        assert line.startswith("trainer-0 shows signs of life again, after a silence since ")
    assert not run.watch.frozen


def test_a_machine_that_slept_kills_nobody(tmp_path: Path) -> None:
    run = Watched(tmp_path / "beat")
    assert not run.pass_s(2)
    run.now_s += 8 * 3600
    assert not run.pass_s(20)
    assert not run.watch.frozen


def test_a_missing_file_says_nothing(tmp_path: Path) -> None:
    run = Watched(tmp_path / "beat")
    run.file.unlink()
    assert not run.pass_s(10 * BOUND_S)
