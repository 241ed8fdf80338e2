"""Plug-ins in files of the user's own beside the job, in real runs: they are used, resumed and replayed, and their code is held to."""

from pathlib import Path

import pytest

from streamrl.errors import EXIT_USER_ERROR
from streamrl_workers.metrics.jsonl import read_jsonl
from support.held_runs import Hold
from support.jobs import simulated_job, tiny_job, write_prompts
from support.runs import LocalRun, streamrl

LOSS = '''
import torch
from bounds import bounded
from streamrl.plugins import GroupAlgorithm, PluginOptions, TokenLoss, group_relative


class Weighted(GroupAlgorithm):
    """Advantage-weighted regression (arXiv 1910.00177)."""

    protocol = 1
    aggregation = "TokenMean"
    skips_equal = False

    class Options(PluginOptions):
        beta: float
        largest_weight: float = 20.0

    def __init__(self, setup):
        super().__init__(setup)
        self.beta, self.most = setup.spec.beta, setup.spec.largest_weight

    def advantages(self, samples):
        return group_relative([sample.reward for sample in samples], normalize_std=False)

    def token_loss(self, batch):
        return TokenLoss.unclipped(-bounded(torch.exp(batch.advantages_N / self.beta), self.most) * batch.logprobs_N)
'''
BOUNDS = "def bounded(weight, most):\n    return weight.clamp(max=most)\n"
CHANGED = "the code has changed since the journal was written; recorded: code of "
OTHERS = """
from pathlib import Path
from streamrl.plugins import DispatchPolicy, Tracker, in_order


class Mine(DispatchPolicy):
    protocol = 1

    def order(self, batch):
        return in_order("my own reasons")


class Lines(Tracker):
    protocol = 1

    def scalars(self, points):
        with Path(self.run.folder, "lines").open("a") as file:
            file.writelines(f"{point.step} {point.kind}\\n" for point in points)
"""


def trained(tmp_path: Path, *, steps: int) -> LocalRun:
    """A run by a loss of the user's own, stopped after two steps."""
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "my_loss.py").write_text(LOSS)
    (tmp_path / "bounds.py").write_text(BOUNDS)
    job = tiny_job(steps=steps)
    [reward] = job["spec"]["task"]["rewards"]
    hold = Hold.on(job, tmp_path, step=2)
    [held] = job["spec"]["task"]["rewards"]
    job["spec"]["task"]["rewards"] = [{**held, "weightPercent": 10}, {**reward, "weightPercent": 90}]
    job["spec"]["algorithm"] = {"python": {"class": "my_loss:Weighted", "options": {"beta": 0.5}}}
    job["spec"]["storage"] = {"archive": {"sharePercent": 100}}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(2)
    assert run.interrupt() == 130, run.logs()
    hold.let_go()
    return run


def test_a_loss_of_the_users_own_trains_and_resumes(tmp_path: Path) -> None:
    run = trained(tmp_path, steps=4)
    (tmp_path / "bounds.py").write_text(BOUNDS.replace("max=most", "max=most / 2"))  # a module that the class uses
    refused = streamrl("replay", str(run.folder))
    assert refused.returncode == EXIT_USER_ERROR
    assert f"spec.algorithm.python.class: {CHANGED}bounds, my_loss, sha256 " in refused.stderr
    (tmp_path / "bounds.py").write_text(BOUNDS)
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert "spec.algorithm.python.class: code of bounds, my_loss, sha256 " in run.assert_exact()
    losses = [step["trainer"]["loss"] for step in read_jsonl(run.folder / "metrics" / "steps.jsonl")]
    assert len(losses) == 4
    assert all(loss > 0 for loss in losses), "weights and cross-entropies are positive, as no loss of ours is"


@pytest.mark.soak
def test_it_is_replayed_bit_for_bit(tmp_path: Path) -> None:
    run = trained(tmp_path, steps=4)
    run.resume()
    assert run.wait_end() == 0, run.logs()
    replayed = streamrl("replay", str(run.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    hashes = [line.split()[2] for line in replayed.stdout.splitlines() if line.startswith("version ")]
    assert len(set(hashes)) == 5, "each step moves the weights"


def test_a_policy_and_a_tracker_of_the_users_own_are_used_and_held_to(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "others.py").write_text(OTHERS)
    job = simulated_job(steps=6)
    job["spec"]["scheduling"]["dispatch"] = {"python": {"class": "others:Mine"}}
    job["spec"]["trackers"] = {"python": {"class": "others:Lines"}}
    hold = Hold.on(job, tmp_path, step=3)
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    run.wait_steps(3)
    assert run.interrupt() == 130, run.logs()
    hold.let_go()
    (tmp_path / "others.py").write_text(OTHERS + "# changed")
    run.resume()
    assert run.wait_end() == EXIT_USER_ERROR, run.logs()
    assert f"spec.scheduling.dispatch.python.class: {CHANGED}others, sha256 " in run.said()
    run.resume("--allow-changed-data")
    assert run.wait_end() == 0, run.logs()
    lines = (run.folder / "trackers" / "python" / "lines").read_text().splitlines()
    assert {f"{step} train" for step in range(1, 7)} <= set(lines)


def test_a_class_that_the_scheduler_cannot_use_is_one_line_before_the_first_step(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "others.py").write_text(OTHERS)
    job = simulated_job()
    job["spec"]["scheduling"]["dispatch"] = {"python": {"class": "others:Lines"}}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == EXIT_USER_ERROR, run.logs()
    assert (
        "spec.scheduling.dispatch.python.class: must be a class that derives from DispatchPolicy of streamrl.plugins, got 'others:Lines'"
        in run.said()
    )
    assert run.steps() == 0
