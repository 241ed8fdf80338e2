"""A loss that we do not ship, in a file of the user's own beside the job: it trains, is resumed and replayed, and its code is held to."""

from pathlib import Path

from streamrl.errors import EXIT_USER_ERROR
from support.held_runs import Hold
from support.jobs import tiny_job, write_prompts
from support.runs import LocalRun, streamrl

LOSS = '''
import torch
from bounds import bounded
from streamrl.plugins import GroupAlgorithm, PluginOptions, TokenLoss, group_relative


class Weighted(GroupAlgorithm):
    """Advantage-weighted regression (arXiv 1910.00177)."""

    protocol = 1
    aggregation = "TokenMean"

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
CHANGED = "spec.algorithm.python.class: the code has changed since the journal was written; recorded: code of bounds, my_loss, sha256 "


def test_a_loss_of_the_users_own_trains_and_resumes_on_the_same_code_alone(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "my_loss.py").write_text(LOSS)
    (tmp_path / "bounds.py").write_text(BOUNDS)
    job = tiny_job(steps=4)
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

    (tmp_path / "bounds.py").write_text(BOUNDS.replace("max=most", "max=most / 2"))  # a module that the class uses
    run.resume()
    assert run.wait_end() == EXIT_USER_ERROR, run.logs()
    assert run.said().count(CHANGED) == 1, run.logs()
    refused = streamrl("replay", str(run.folder))
    assert (refused.returncode, CHANGED in refused.stderr) == (EXIT_USER_ERROR, True), refused.stderr

    (tmp_path / "bounds.py").write_text(BOUNDS)
    run.resume()
    assert run.wait_end() == 0, run.logs()
    assert "spec.algorithm.python.class: code of bounds, my_loss, sha256 " in run.assert_exact()
    replayed = streamrl("replay", str(run.folder))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    hashes = [line.split()[2] for line in replayed.stdout.splitlines() if line.startswith("version ")]
    assert len(set(hashes)) == 5, "each step moves the weights"
