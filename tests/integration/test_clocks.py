"""Wall clocks that jump by an hour or ten years, or go ten times too slow, of one process or of all: nothing waits, ends, is killed or lost.

Monotonic clocks stay as they are: a kernel moves them for nobody. Part of `make soak`.
"""

import logging
import os
import random
from pathlib import Path

import pytest

from streamrl.keys import ENV_LIVENESS_SECONDS
from support.fault_campaign import MARK, FaultCampaign
from support.fault_modes import JUDGE, MODES
from support.moved_clocks import ALL, MovedClocks
from support.runs import LocalRun

HOUR_S, TEN_YEARS_S = 3600.0, 3650 * 86400.0
MOVES = (HOUR_S, -HOUR_S, TEN_YEARS_S, -TEN_YEARS_S, 0.0)
SLOW, JUMPS = 10, 30
ABOUT_ANSWERS = "answers end at a limit of tokens"
"""What a tiny model is warned of, whatever the time is."""
SEEDS = range(int(os.environ.get("CLOCK_SEEDS", "1")))

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]
log = logging.getLogger(__name__)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", ["mixture", "lent", "elastic", "ranked_and_tracked", "judge", "agents", "frozen"])
def test_clocks_are_looked_at_and_nothing_goes_by_them(
    mode: str, seed: int, judge_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks, rng = MovedClocks.make(tmp_path), random.Random(f"{mode} {seed}")
    (tmp_path / JUDGE).write_text(judge_url)
    job = MODES[mode](tmp_path)
    for name, value in {**clocks.environment, ENV_LIVENESS_SECONDS: "20", MARK: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    steps, groups = job["spec"]["pipeline"]["steps"], job["spec"]["pipeline"]["batchGroups"]
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    campaign = FaultCampaign(run, rng, 20.0)
    for moment in sorted(rng.choices(range(1, steps), k=JUMPS)):
        if not campaign.reached(moment):
            break
        pids = {kind: [one.pid for one in found] for kind, found in campaign.victims().items()}
        pids |= {"all": [ALL], "runner": [run.process.pid]}
        kind = rng.choice(sorted(pids))
        pid = rng.choice(pids[kind])
        by_s = rng.choice([*MOVES, None])
        clocks.move(pid, by_s=by_s or 0.0, slow_by=SLOW if by_s is None else 0)
        campaign.done[f"{'slow' if by_s is None else f'{by_s:+.0f} s'} {kind}"] += 1
    assert run.process.wait(300) == 0, campaign.explain()
    campaign.assert_exact(steps=steps, groups=groups)
    log.warning("%s %d: %s", mode, seed, dict(campaign.done))
    assert "starting it again" not in run.said()
    assert [line for line in campaign.warnings() if ABOUT_ANSWERS not in line] == []
