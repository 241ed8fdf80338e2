"""What a log of mixed answers teaches, by how its rows are weighed.

    python benchmarks/logged_answers.py [--prompts 800] [--steps 120] [--seeds 0 1 2] [--only best "dual generator"]

The log: the README's warmed-up model answers each of `--prompts` prompts eight times; about half are right. Each variant learns from it for the same steps, from the same model, in one process: rows, weights
and trainer are those of a job with `algorithm.supervised`. Prints what the log and the variants earn on held-out prompts, by greedy answers
and by sampled ones; then, with `--online N`, by greedy ones behind N more steps of `grpo` from there.

In `shifted` rows a number that the prompt draws is added to rewards: they compare within a prompt alone, as a judge's may. Where only
differences within a prompt count this changes nothing, so `best` alone is run with it.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from run_folders import EXAMPLE
from stale_policies import CACHE, HELD_OUT, Sampler, Weights

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_cli.jobfile import load_job
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.models.prepare import prepare
from streamrl_workers.rewards.registry import make_parts
from streamrl_workers.scheduler.extensions.supervised import demonstrated_sample
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.tasks.dataset import Item, MixedDataset, open_dataset
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import RankModels, TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker

ANSWERS = 8
"""Of the log, to each prompt."""
BATCH_ROWS = 64
AT_ONCE = 250
"""Prompts that are answered together: memory."""

VARIANTS: Mapping[str, str] = {
    "all": "{}",
    "best": "{minReward: 1.0}",
    "best, shifted": "{rewardField: shifted, minReward: 0.5}",
    "dual generator": "{weights: {dualGenerator: {}}}",
    "dual generator, 25 %": "{weights: {dualGenerator: {sharePercent: 25}}}",
    "advantage": "{weights: {advantage: {}}}",
}


def write_log(path: Path, items: Sequence[Item], *, sampler: Sampler, weights: Weights) -> float:
    """Each prompt with its answers, as a run's log has them; what they earned on average."""
    rewards = []
    with path.open("w") as file:
        for first in range(0, len(items), AT_ONCE):
            part = items[first : first + AT_ONCE]
            groups = sampler.groups(part, weights=weights, size=ANSWERS, step=0, first_id=first)
            for group, item in zip(groups, part, strict=True):
                shift = random.Random(item.prompt).uniform(-1.0, 1.0)
                for sample in group.samples:
                    file.write(json.dumps(_row(sample, prompt=item.prompt, shift=shift)) + "\n")
                    rewards.append(sample.reward)
    return statistics.fmean(rewards)


def _row(sample: pb.Sample, *, prompt: str, shift: float) -> dict[str, object]:
    return {
        "prompt": prompt,
        "prompt_tokens": unpack_int32(sample.prompt_tokens).tolist(),
        "tokens": unpack_int32(sample.tokens).tolist(),
        "reward": sample.reward,
        "shifted": sample.reward + shift,
    }


def learn(models: RankModels, *, spec: RLJobSpec, rows: MixedDataset) -> None:
    """As a supervised job's trainer does, from rows in the order of a pass."""
    engine = TorchEngine(SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec))
    for step in range(spec.pipeline.steps):
        engine.begin_step(step, attempt=1)
        for index in range(step * BATCH_ROWS, (step + 1) * BATCH_ROWS):
            shown = rows.demonstration(rows.item("train", index))
            assert shown is not None
            sample = demonstrated_sample(shown, group_id=index, version=step)
            engine.add([pb.Group(group_id=index, samples=[sample])])
        engine.finish_step()


def go_on(models: RankModels, *, spec: RLJobSpec, dataset: MixedDataset, sampler: Sampler) -> None:
    """The README's job from these weights, on policy."""
    engine = TorchEngine(SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec))
    batch = spec.pipeline.batch_groups
    for step in range(spec.pipeline.steps):
        items = [dataset.item("train", step * batch + number) for number in range(batch)]
        weights = models.model.state_dict()
        engine.begin_step(step, attempt=1)
        engine.add(sampler.groups(items, weights=weights, size=spec.task.group_size, step=step, first_id=step * batch))
        engine.finish_step()


def supervised(spec_changes: Sequence[str], *, log: Path, variant: str) -> RLJobSpec:
    """The job that learns from the log."""
    constants = variant.removeprefix("{").removesuffix("}")
    field = "" if "rewardField" in constants else "rewardField: reward, "
    return load_job(
        EXAMPLE.parent / "supervised.yaml",
        overrides=[
            *spec_changes,
            f"spec.algorithm={{supervised: {{answers: Tokens, {field}{constants}}}}}",
            f"spec.task={{dataset: {{jsonl: {{path: {log}}}}}, groupSize: 1, sampling: {{maxTokens: 24}}}}",
            "spec.generators=[]",
            f"spec.pipeline.batchGroups={BATCH_ROWS}",
            "spec.trainer.learningRate=1.0e-3",
            "spec.trainer.warmUpSteps=5",
        ],
    ).spec


def main() -> None:
    """Run them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=800)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--online", type=int, default=0, help="steps of grpo behind")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        job = load_job(EXAMPLE, overrides=[f"spec.seed={seed}", f"spec.pipeline.steps={max(1, args.online)}"]).spec
        model = str(prepare(job, cache_dir=CACHE, base_dir=EXAMPLE.parent, report=lambda _: None))
        dataset = open_dataset(job.task, seed=seed, base_dir=EXAMPLE.parent)
        sampler = Sampler(
            model=load_model(model).eval(),
            tokenizer=load_tokenizer(model),
            parts=make_parts(job.task.rewards, verify=dataset.only.verify, base_dir=EXAMPLE.parent),
            max_tokens=job.task.sampling.max_tokens,
        )
        held_out = [dataset.item("held_out", index) for index in range(HELD_OUT)]
        torch.manual_seed(seed)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log.jsonl"
            initial = load_model(model).state_dict()
            items = [dataset.item("train", index) for index in range(args.prompts)]
            earned = write_log(log, items, sampler=sampler, weights=initial)
            greedy = sampler.held_out(held_out, weights=initial)
            print(f"| {seed} | the log | {greedy:.3f} | {earned:.3f} | |", flush=True)
            for name in args.only:
                changes = [f"spec.seed={seed}", f"spec.pipeline.steps={args.steps}"]
                spec = supervised(changes, log=log, variant=VARIANTS[name])
                rows = open_dataset(
                    spec.task,
                    seed=seed,
                    base_dir=EXAMPLE.parent,
                    model_path=model,
                    supervised=spec.algorithm.supervised,
                )
                models = build_models(spec, model_path=model, device=torch.device("cpu"))
                learn(models, spec=spec, rows=rows)
                weights = models.model.state_dict()
                greedy = sampler.held_out(held_out, weights=weights)
                sampled = _sampled(held_out, sampler=sampler, weights=weights)
                online = ""
                if args.online:
                    go_on(models, spec=job, dataset=dataset, sampler=sampler)
                    online = f"{sampler.held_out(held_out, weights=models.model.state_dict()):.3f}"
                print(f"| {seed} | {name} | {greedy:.3f} | {sampled:.3f} | {online} |", flush=True)


def _sampled(items: Sequence[Item], *, sampler: Sampler, weights: Weights) -> float:
    """Mean reward of four sampled answers to each."""
    groups = sampler.groups(items, weights=weights, size=4, step=0, first_id=0)
    return statistics.fmean(sample.reward for group in groups for sample in group.samples)


if __name__ == "__main__":
    main()
