"""Ranks killed in the midst of a checkpoint's writes, 25 times: part of `make soak`."""

import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from streamrl_workers.trainer.checkpoint import CheckpointStore
from support.rank_team import RankTeam
from support.tiny_folder import tiny_folder

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]  # each life loads torch in every rank

KILLS = 25
SIZE = 2
FILES = SIZE + 2
"""Of a checkpoint: one of each rank, the meta file, and one more than there are: the kill comes after its name."""
DEADLINE_S = 120.0
JOB: dict[str, Any] = {"microBatchTokens": 32, "steps": 1000}


def test_killed_within_their_writes_ranks_repeat_their_steps_exactly(tmp_path: Path) -> None:
    """What was a checkpoint stays one, and the weights are those of a run without kills, bit for bit."""
    model, root, rng = tiny_folder(tmp_path / "model"), tmp_path / "checkpoints", Random(0)
    store, seen = CheckpointStore(root, keep_last=2), [0]
    for kill in range(KILLS):
        with RankTeam(tmp_path / "run", size=SIZE, model=model, **JOB) as team:
            step = _resumed(team, store)
            assert step >= seen[-1], f"kill {kill} lost the checkpoint of step {seen[-1]}"
            seen.append(step)
            team.steps(1, first=step)
            _kill_within(team, root, step=step + 1, rng=rng)
    with RankTeam(tmp_path / "run", size=SIZE, model=model, **JOB) as team:
        steps = _resumed(team, store)
        found = team.tensors("found")
        assert team.leave() == [0] * SIZE, team.log(1)
    assert 0 < steps < KILLS, "kills came before and after a checkpoint was whole"
    with RankTeam(tmp_path / "whole", size=SIZE, model=model, **JOB) as team:
        assert team.answer() == "ready", team.log(0)
        team.steps(steps)
        expected = team.tensors("expected")
        assert team.leave() == [0] * SIZE, team.log(1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def _resumed(team: RankTeam, store: CheckpointStore) -> int:
    """Load the newest checkpoint; its step."""
    assert team.answer() == "ready", team.log(0)
    store.clean()
    found = store.newest()
    if found is None:
        return 0
    team.ask(do="load", folder=str(found.directory))
    return found.meta.step


def _files(partial: Path) -> int:
    """Files of a checkpoint under way; it may get its name at any moment."""
    with suppress(FileNotFoundError):
        return len([*partial.iterdir()])
    return 0


def _kill_within(team: RankTeam, root: Path, *, step: int, rng: Random) -> None:
    """End a rank by SIGKILL once the checkpoint has a number of files; the other one ends too."""
    partial, whole = root / f".partial-step-{step:08d}", root / f"step-{step:08d}"
    files, deadline_s = rng.randrange(FILES), time.monotonic() + DEADLINE_S
    team.tell(do="commit", folder=str(root), step=step)
    while not whole.exists() and _files(partial) < files:
        assert time.monotonic() < deadline_s, team.log(0)
    team.ranks[rng.randrange(SIZE)].kill()
    if team.ranks[0].stdin is not None:
        team.ranks[0].stdin.close()
    for rank in range(SIZE):
        assert team.wait(rank) in {-9, 0, 75, 76}, team.log(rank)
