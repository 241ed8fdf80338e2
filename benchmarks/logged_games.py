"""What a log of played games teaches, by how its rows and turns are weighed.

    python benchmarks/logged_games.py [--games 2000] [--steps 100] [--seeds 0 1] [--only best critic]

The log: the warmed-up model of `examples/guess-number.yaml` plays `--games` games, which pay at their end. Each variant learns from it for
the same steps of 64 rows, from the same model, in one process: rows, weights and trainer are those of a job with `algorithm.supervised`.
Prints which share of 1,000 sampled games the log's player and the variants win.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from late_rewards import CACHE, HIGHEST, JOB, PROMPT, Game, Played, Sampler
from logged_answers import BATCH_ROWS, learn

from streamrl.spec import RLJobSpec
from streamrl_cli.jobfile import load_job
from streamrl_workers.models.load import load_model
from streamrl_workers.models.prepare import prepare
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.tasks.dataset import open_dataset
from streamrl_workers.trainer.engines.torch_engine import build_models

JUDGED = 1000
NAMES = 40
"""Of games: rows of one name are compared, and some names are held out. The model does not see them."""
VARIANTS: Mapping[str, str] = {
    "all": "{}",
    "best": "{minReward: 1.0}",
    "advantage": "{weights: {advantage: {}}}",
    "critic": "{weights: {critic: {learningRate: 1.0e-3, beta: 0.1, warmUpSteps: 30}}}",
}


def write_log(path: Path, played: list[Played], *, sampler: Sampler) -> None:
    """As `streamrl samples --all --json` does."""
    with path.open("w") as file:
        for number, one in enumerate(played):
            sample = sampler.sample(one, group_id=number, index=0, step=0)
            row = {
                "prompt": f"{PROMPT}{number % NAMES}",
                "prompt_tokens": unpack_int32(sample.prompt_tokens).tolist(),
                "tokens": unpack_int32(sample.tokens).tolist(),
                "segments": [{"tokens": part.tokens, "observation": part.observation} for part in sample.segments],
                "reward": one.reward,
            }
            file.write(json.dumps(row) + "\n")


def job_of(constants: str, *, log: Path, seed: int, steps: int) -> RLJobSpec:
    """The job that learns from the log."""
    field = "{answers: Tokens, rewardField: reward, " + constants.removeprefix("{")
    changes = [
        f"spec.seed={seed}",
        f"spec.algorithm={{supervised: {field}}}",
        f"spec.task={{dataset: {{jsonl: {{path: {log}}}}}, groupSize: 1, sampling: {{maxTokens: 48}}}}",
        f"spec.pipeline={{mode: StreamSync, maxStalenessSteps: 0, batchGroups: {BATCH_ROWS}, steps: {steps}}}",
        "spec.generators=[]",
    ]
    return load_job(JOB, overrides=changes).spec


def won(sampler: Sampler) -> float:
    """Share of sampled games, each number as often."""
    return statistics.fmean(one.reward for one in sampler.play([Game(n % (HIGHEST + 1)) for n in range(JUDGED)]))


def main() -> None:
    """Run them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--weights", help="these instead, as in `spec.algorithm.supervised`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {args.weights: args.weights} if args.weights else {name: VARIANTS[name] for name in args.only}
    for seed in args.seeds:
        game = load_job(JOB, overrides=[f"spec.seed={seed}"]).spec
        folder = str(prepare(game, cache_dir=CACHE, base_dir=JOB.parent, report=lambda _: None))
        actor = load_model(folder).eval()
        sampler = Sampler(actor, folder=folder, spec=game)
        torch.manual_seed(seed)
        print(f"| {seed} | the log | {won(sampler):.3f} |", flush=True)
        played = sampler.play([Game(n % (HIGHEST + 1)) for n in range(args.games)])
        with tempfile.TemporaryDirectory() as base:
            write_log(log := Path(base) / "log.jsonl", played, sampler=sampler)
            for name, constants in chosen.items():
                spec = job_of(constants, log=log, seed=seed, steps=args.steps)
                given = spec.algorithm.supervised
                rows = open_dataset(spec.task, seed=seed, base_dir=Path(base), model_path=folder, supervised=given)
                models = build_models(spec, model_path=folder, device=torch.device("cpu"))
                learn(models, spec=spec, rows=rows)
                actor.load_state_dict(models.model.state_dict())
                print(f"| {seed} | {name} | {won(sampler):.3f} |", flush=True)


if __name__ == "__main__":
    main()
