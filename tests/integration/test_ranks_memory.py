"""A rank whose memory runs out within a pass: the others do not wait, the group restarts once, and trains the same."""

import resource
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import create
from support.rank0 import act
from support.rank_team import RankTeam
from support.tiny_folder import tiny_folder
from support.trainer_groups import trainer_spec

pytestmark = pytest.mark.timeout(600)  # as test_ranks.py

FAR_S = 3600.0
GROUPS = 200
JOB: dict[str, Any] = {"microBatchTokens": 4096, "rankTimeoutSeconds": FAR_S}
MARGIN_BYTES = 24 * 2**20
"""A pass of 4,096 tokens of this model takes some hundred MiB, and half of it still more than this."""


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
    """A small step, so that all libraries are loaded; then one that rank 1 has no memory for. Exit codes by rank."""
    assert team.answer() == "ready"
    team.steps(1)
    _limit(team.ranks[1].pid)
    team.tell(do="step", step=1, groups=GROUPS)
    return [team.wait(rank) for rank in range(2)]


def test_the_group_restarts_once_with_smaller_passes(tmp_path: Path) -> None:
    model, folder = _wide(tmp_path / "model"), tmp_path / "run"
    with RankTeam(folder, size=2, model=model, **JOB) as team:
        assert _fill_up(team) == [75, 75], team.log(1)
        assert "did not fit the memory of rank 1: restarting with passes of" in team.log(1).splitlines()[-1]
    one = create(EngineSetup(spec=trainer_spec(**JOB), model_path=str(model), threads=1))
    with RankTeam(folder, size=2, model=model, **JOB) as team:
        assert team.answer() == "ready"
        found = team.steps(1, groups=GROUPS)[0]
        assert "the memory holds passes of" in team.log(0)
        _limit(team.ranks[1].pid)
        team.tell(do="step", step=1, groups=GROUPS)
        assert [team.wait(rank) for rank in range(2)] == [2, 2], team.log(1)
        for rank in range(2):
            line = team.log(rank).splitlines()[-1]
            assert line.startswith("spec.trainer.microBatchTokens: is more than the memory of rank 1 holds: a pass of")
    assert found == pytest.approx(act(one, {"do": "step", "step": 0, "groups": GROUPS}), rel=1e-4, abs=1e-4)
