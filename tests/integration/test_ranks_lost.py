"""A rank that dies or stops: nobody waits for ever, the others say who it was, and end with 75."""

import os
import re
import signal
from pathlib import Path

import pytest

from streamrl_workers.trainer.checkpoint import CheckpointStore
from support.rank_team import RankTeam
from support.tiny_folder import tiny_folder

pytestmark = pytest.mark.timeout(600)  # as test_ranks.py

TIMEOUT_S = 20.0
FAR_S = 3600.0
"""Nobody waits so long here: what is seen is seen otherwise."""


def _ready(folder: Path, *, timeout_s: float) -> RankTeam:
    return RankTeam(folder / "run", size=2, model=tiny_folder(folder / "model"), rankTimeoutSeconds=timeout_s)


def test_a_killed_rank_is_named_at_once(tmp_path: Path) -> None:
    with _ready(tmp_path, timeout_s=FAR_S) as team:
        assert team.answer() == "ready"
        team.steps(1)
        team.ranks[1].kill()
        team.tell(do="step", step=1, groups=3)
        assert team.wait(0) == 75
        assert team.log(0).splitlines()[-1] == "rank 1 is gone"


def test_a_stopped_rank_is_named_within_its_deadline(tmp_path: Path) -> None:
    with _ready(tmp_path, timeout_s=TIMEOUT_S) as team:
        assert team.answer() == "ready"
        team.steps(1)
        os.kill(team.ranks[1].pid, signal.SIGSTOP)
        team.tell(do="step", step=1, groups=3)
        assert team.wait(0) == 75
        silence = re.search(r"rank 1 is silent for (\d+)", team.log(0).splitlines()[-1])
        assert silence is not None, team.log(0)
        assert int(silence[1]) >= TIMEOUT_S


def test_a_full_disk_of_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    with _ready(tmp_path, timeout_s=FAR_S) as team:
        assert team.answer() == "ready"
        team.tell(do="checkpoint", folder=str(tmp_path / "checkpoints"), full="rank-00001.safetensors")
        assert [team.wait(rank) for rank in (0, 1)] == [2, 0], team.log(1)
        rule = "a checkpoint cannot be written: No space left on device; free the disk, then resume the run"
        assert team.log(0).splitlines()[-1] == f"{tmp_path}/checkpoints: {rule}"
    assert CheckpointStore(tmp_path / "checkpoints", keep_last=1).newest() is None


def test_without_rank_0_the_others_end(tmp_path: Path) -> None:
    with _ready(tmp_path, timeout_s=FAR_S) as team:
        assert team.answer() == "ready"
        team.ranks[0].kill()
        assert team.wait(1) == 75
        assert team.log(1).splitlines()[-1] == "rank 0 is gone"


def test_a_rank_that_is_killed_before_it_gave_its_part_of_a_version_is_named(tmp_path: Path) -> None:
    with _ready(tmp_path, timeout_s=FAR_S) as team:
        assert team.answer() == "ready"
        team.ask(do="copy", step=0)
        team.ranks[1].kill()
        team.tell(do="publish", step=0)
        assert team.wait(0) == 75
        assert team.log(0).splitlines()[-1] == "rank 1 is gone"
