"""`pipeline.delivery: Logical`: real runs of one job have the same weights, whatever dies and wherever generators are; `diff` finds the one sample that is another."""

from pathlib import Path

import pytest

from streamrl_cli.replaying.history import RunHistory, read_history
from support.replayed_runs import STEPS, in_order, run_with_kills
from support.runs import streamrl

pytestmark = pytest.mark.timeout(3600)

CHANGED_GROUP, CHANGED_SAMPLE, ITS_STEP = 9, 2, 2
OTHER_SEED = f"""
import sys

if "streamrl_workers.scheduler" in sys.orig_argv:
    from streamrl_workers.scheduler import sample

    drawn = sample.sample_seed

    def sample_seed(job_seed, *, group_id, sample_index):
        seed = drawn(job_seed, group_id=group_id, sample_index=sample_index)
        return seed ^ ((group_id, sample_index) == ({CHANGED_GROUP}, {CHANGED_SAMPLE}))

    sample.sample_seed = sample_seed
"""
"""As `sitecustomize`: one sample of the run is drawn with another seed."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_kills(in_order(), tmp_path_factory.mktemp("undisturbed"), seed=0, kills=0).folder


def hashes(history: RunHistory) -> list[bytes]:
    return [history.hash_of(version) for version in range(STEPS + 1)]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_runs_with_kills_have_the_same_weights(seed: int, undisturbed: Path, tmp_path: Path) -> None:
    run = run_with_kills(in_order(), tmp_path, seed=seed, kills=3)
    expected = read_history(undisturbed)
    assert len(set(hashes(expected))) == STEPS + 1, "every step moves the weights"
    assert any(step.micro_steps for step in expected.steps)
    compared = streamrl("diff", str(undisturbed), str(run.folder))
    assert (compared.returncode, compared.stdout) == (0, f"the same in all {STEPS} steps of both\n"), compared
    assert hashes(read_history(run.folder)) == hashes(expected)


def test_samples_in_batches_have_the_same_weights_too(tmp_path: Path) -> None:
    """Two runs with other kills: other neighbours for every sample."""
    job = in_order(slots=8, batchInvariant=True)
    generators = ("generator-tiny-0", "generator-tiny-1")
    runs = [run_with_kills(job, tmp_path / f"{seed}", seed=seed, kills=2, workers=generators).folder for seed in (3, 4)]
    compared = streamrl("diff", *map(str, runs))
    assert (compared.returncode, compared.stdout) == (0, f"the same in all {STEPS} steps of both\n"), compared
    one, other = (hashes(read_history(folder)) for folder in runs)
    assert one == other
    assert len(set(one)) == STEPS + 1


def test_diff_finds_the_sample_that_had_another_seed(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_SEED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = run_with_kills(in_order(), tmp_path, seed=0, kills=0)
    monkeypatch.delenv("PYTHONPATH")
    compared = streamrl("diff", str(undisturbed), str(run.folder))
    assert compared.returncode == 1, compared
    first, *following = compared.stdout.splitlines()
    assert first.startswith(f"step {ITS_STEP}: group {CHANGED_GROUP} sample {CHANGED_SAMPLE}: token "), compared
    assert all(line.startswith(f"step {ITS_STEP}: ") for line in following)


def test_weights_are_the_same_wherever_generators_are(undisturbed: Path, tmp_path: Path) -> None:
    """Apart, on the trainer's devices in turn, and one of each: placement is none of the algorithm's business."""
    colocated, lending = in_order(), in_order()
    colocated["spec"]["pipeline"]["mode"] = "Colocated"
    own = lending["spec"]["generators"][0]
    own["scaling"] = {"static": {"replicas": 1}}
    lending["spec"]["generators"].append({**own, "name": "lent", "devices": "Trainer"})
    for name, job in {"colocated": colocated, "lending": lending}.items():
        other = run_with_kills(job, tmp_path / name, seed=0, kills=0)
        compared = streamrl("diff", str(undisturbed), str(other.folder))
        *jobs, last = compared.stdout.splitlines()
        assert last == f"the same in all {STEPS} steps of both", compared
        assert jobs and all(line.startswith("job: spec.") for line in jobs), compared
