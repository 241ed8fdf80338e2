"""Kills and freezes at random moments in each mode of work: ten kills and five freezes a run. Part of `make soak`.

`FAULT_SEEDS=N` makes so many runs a mode, `FAULTS="KILLS FREEZES"` so many faults a run.
"""

import logging
import os
import random
from pathlib import Path

import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from support.fault_campaign import MARK, FaultCampaign
from support.fault_modes import JUDGE, MODES
from support.runs import LocalRun

KILLS, FREEZES = (int(count) for count in os.environ.get("FAULTS", "10 5").split())
SEEDS = range(int(os.environ.get("FAULT_SEEDS", "1")))
SIMULATED_S, TORCH_S = 5.0, 20.0
"""Bounds of liveness instead of 90 s. Imports of torch hold the interpreter for seconds on a busy machine."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
log = logging.getLogger(__name__)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_exact(mode: str, seed: int, judge_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / JUDGE).write_text(judge_url)
    job = MODES[mode](tmp_path)
    is_torch = "simulated" not in job["spec"]["trainer"].get("engine", {})
    bound_s = TORCH_S if is_torch else SIMULATED_S
    monkeypatch.setenv(ENV_LIVENESS_SECONDS, str(bound_s))
    monkeypatch.setenv(MARK, str(tmp_path))
    steps, groups = job["spec"]["pipeline"]["steps"], job["spec"]["pipeline"]["batchGroups"]
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    campaign = FaultCampaign(run, random.Random(f"{mode} {seed}"), bound_s)
    campaign.go([*KILLS * ["kill"], *FREEZES * ["freeze"]], steps=steps)
    counts = campaign.sums("reward_failed", "score_failures", "dropped")
    log.warning("%s %d: %s; %s", mode, seed, dict(campaign.done), dict(counts))
    campaign.assert_exact(steps=steps, groups=groups)
    if is_torch:
        campaign.assert_replayed(steps=steps)
    campaign.assert_explained()
