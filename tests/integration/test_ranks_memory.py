"""A rank whose memory runs out within a pass: the others do not wait, the group restarts once, with smaller passes."""

import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.rank_team import RankTeam
from support.tiny_folder import tiny_folder

pytestmark = [pytest.mark.timeout(600), pytest.mark.soak]  # four processes load torch, as in test_ranks.py

FAR_S = 3600.0
ENDS_S = 60.0
"""The rank that fails ends the others; nobody waits for a deadline of a collective."""
GROUPS = 600
JOB: dict[str, Any] = {"microBatchTokens": 65_536, "rankTimeoutSeconds": FAR_S}
MARGIN_BYTES = 16 * 2**20
"""A pass of the groups takes some hundred MiB of this model, and half of it still more than this."""


def _wide(folder: Path) -> Path:
    tiny_folder(folder)
    config = Qwen3Config.from_pretrained(folder)
    config.hidden_size, config.intermediate_size = 128, 512
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def _limit(pid: int) -> None:
    """Let the process grow by the margin alone: torch's allocator for processors then raises its error."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + MARGIN_BYTES
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def _fill_up(team: RankTeam) -> list[int]:
    """A small step, so that all libraries are loaded; then one that rank 1 has no memory for. Exit codes of rank 1 and rank 0."""
    assert team.answer() == "ready"
    team.steps(1)
    _limit(team.ranks[1].pid)
    team.tell(do="step", step=1, groups=GROUPS)
    return [team.wait(rank, timeout_s=ENDS_S) for rank in (1, 0)]


def test_the_group_restarts_once_and_then_says_what_to_set(tmp_path: Path) -> None:
    model, folder = _wide(tmp_path / "model"), tmp_path / "run"
    with RankTeam(folder, size=2, model=model, **JOB) as team:
        assert _fill_up(team) == [75, 75], team.log(1)
        assert "did not fit the memory of rank 1: restarting with passes of" in team.log(1).splitlines()[-1]
    with RankTeam(folder, size=2, model=model, **JOB) as team:
        assert _fill_up(team) == [2, 2], team.log(1)
        assert "the memory holds passes of" in team.log(0)
        for rank in range(2):
            line = team.log(rank).splitlines()[-1]
            assert line.startswith("spec.trainer.microBatchTokens: is more than the memory of rank 1 holds: a pass of")
