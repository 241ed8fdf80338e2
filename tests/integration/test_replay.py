"""`streamrl replay`: real runs with kills, trained again from their samples, give the same weights, bit for bit."""

from pathlib import Path

import pytest

from streamrl_cli.replaying.history import read_history
from support.replayed_runs import PATIENCE_S, STEPS, run_with_kills, small_batches
from support.runs import LocalRun, streamrl

pytestmark = pytest.mark.timeout(3600)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.soak
def test_runs_with_kills_at_random_moments_are_replayed(seed: int, tmp_path: Path) -> None:
    _assert_replayed(run_with_kills(small_batches(), tmp_path, seed=seed, kills=1 + seed % 5))


def test_a_run_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    run = run_with_kills(small_batches(), tmp_path, seed=2, kills=2)
    history = read_history(run.folder)
    assert any(step.micro_steps for step in history.steps), "no step was trained in parts"
    _assert_replayed(run)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["http", "folder"])
def test_a_run_of_two_ranks_is_replayed(transport: str, tmp_path: Path) -> None:
    """Its versions are slices of both; the replay writes to no folder."""
    job, folder = small_batches(), tmp_path / "weights"
    folder.mkdir()
    job["spec"]["trainer"] = {**job["spec"].get("trainer", {}), "processesPerNode": 2, "rankTimeoutSeconds": 120}
    job["spec"]["weights"] = {"http": {}} if transport == "http" else {"folder": {"url": str(folder)}}
    run = run_with_kills(job, tmp_path, seed=2, kills=2, workers=("trainer-0", "trainer-1"))
    before = sorted(folder.rglob("*"))
    _assert_replayed(run)
    assert sorted(folder.rglob("*")) == before
    assert bool(before) == (transport == "folder")


def _assert_replayed(run: LocalRun) -> None:
    replayed = streamrl("replay", str(run.folder), deadline_s=PATIENCE_S)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert replayed.stdout.endswith(f"compared steps 1 to {STEPS}: all are the same\n")
