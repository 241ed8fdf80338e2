"""What is learned by all weights, by adapters, and by a side path with the last layer, in one process.

    python benchmarks/tuning.py [--steps 20] [--groups 32] [--seeds 0 1 2] [--only lora sherl]

The README's job, with its trainer engine and generator engine `hf` taking turns: each step's samples are of the newest version, as
generators get it (merged adapters, or tensors of the side path). Prints held-out reward of greedy answers by step.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from run_folders import EXAMPLE

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_cli.jobfile import load_job
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.engines.hf.engine import HfEngine, create
from streamrl_workers.models.prepare import prepare
from streamrl_workers.models.published import merged
from streamrl_workers.rewards.registry import make_parts
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.tasks.dataset import Item, open_dataset
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker

CACHE = Path.home() / ".cache" / "streamrl" / "models"
HELD_OUT = 256
SLOTS = 128
VARIANTS: Mapping[str, Sequence[str]] = {
    "all weights": (),
    "lora": ("spec.trainer.lora={rank: 16}", "spec.trainer.learningRate=2.0e-3"),
    "sherl": ("spec.trainer.sherl={lateLayers: 1, width: 32}", "spec.trainer.learningRate=5.0e-4"),
}


def draw(
    engine: HfEngine, items: Sequence[Item], *, sampling: pb.Sampling, first_id: int
) -> tuple[list[pb.Sample], list[str]]:
    """One sample of each item, in their order, without its reward; and the texts."""
    waiting = [
        pb.SampleRequest(lease=place, group_id=place, prompt=item.prompt, sampling=sampling, seed=first_id + place)
        for place, item in enumerate(items)
    ]
    made = [pb.Sample(generator_id="generator-local-0") for _ in items]
    left, taken, texts = len(items), 0, [""] * len(items)
    tokens: list[list[int]] = [[] for _ in items]
    logprobs: list[list[float]] = [[] for _ in items]
    while left:
        coming = waiting[taken : taken + engine.free()]
        taken += len(coming)
        for delta in [*engine.add(coming), *engine.step()]:
            tokens[delta.lease] += delta.tokens
            logprobs[delta.lease] += delta.logprobs
            if delta.prompt_tokens is not None:
                made[delta.lease].prompt_tokens = pack_int32(delta.prompt_tokens)
            if delta.finish_reason is not None:
                texts[delta.lease] = delta.text or ""
                left -= 1
    for sample, its_tokens, its_logprobs in zip(made, tokens, logprobs, strict=True):
        sample.tokens, sample.logprobs = pack_int32(its_tokens), pack_float32(its_logprobs)
        sample.spans.append(pb.VersionSpan(tokens=len(its_tokens), step=engine.version or 0, attempt=1))
    return made, texts


def run(spec: RLJobSpec, *, every: int) -> list[float]:
    """Held-out reward at the start and behind each `every` steps."""
    model = str(prepare(spec, cache_dir=CACHE, base_dir=EXAMPLE.parent, report=lambda _: None))
    dataset = open_dataset(spec.task, seed=spec.seed, base_dir=EXAMPLE.parent)
    parts = make_parts(spec.task.rewards, verify=dataset.only.verify, base_dir=EXAMPLE.parent)

    def rewarded(texts: Sequence[str], items: Sequence[Item]) -> list[float]:
        return [sum(part.value(text, item) for part in parts) for text, item in zip(texts, items, strict=True)]

    held_out = [dataset.item("held_out", index) for index in range(HELD_OUT)]
    models = build_models(spec, model_path=model, device=torch.device("cpu"))
    trainer = TorchEngine(SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec))
    options = EngineOptions(spec=spec.generators[0].engine.value, model_path=model, sherl=spec.trainer.sherl)
    generator, size, batch = create(options), spec.task.group_size, spec.pipeline.batch_groups
    greedy, sampled = (pb.Sampling(temperature=heat, top_p=1.0, max_tokens=24) for heat in (0.0, 1.0))
    curve = []
    for step in range(spec.pipeline.steps + 1):
        generator.load_weights(version=step, tensors=merged(trainer.tensors()))
        if step % every == 0:
            _, answers = draw(generator, held_out, sampling=greedy, first_id=0)
            curve.append(statistics.fmean(rewarded(answers, held_out)))
        if step == spec.pipeline.steps:
            break
        items = [dataset.item("train", step * batch + number) for number in range(batch)]
        repeated = [item for item in items for _ in range(size)]
        samples, texts = draw(generator, repeated, sampling=sampled, first_id=step * batch * size)
        for place, (sample, reward) in enumerate(zip(samples, rewarded(texts, repeated), strict=True)):
            sample.group_id, sample.sample_index, sample.reward = step * batch + place // size, place % size, reward
        trainer.begin_step(step, attempt=1)
        trainer.add([pb.Group(group_id=step * batch + n, step=step, samples=samples[n * size : (n + 1) * size]) for n in range(batch)])  # fmt: skip
        trainer.finish_step()
    return curve


def main() -> None:
    """Run them, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=32, help="a step")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name in args.only:
            fixed = (
                f"spec.seed={seed}",
                f"spec.pipeline.steps={args.steps}",
                f"spec.pipeline.batchGroups={args.groups}",
            )
            curve = run(load_job(EXAMPLE, overrides=[*fixed, *VARIANTS[name]]).spec, every=args.every)
            print(f"| {seed} | {name} | {' | '.join(f'{reward:.3f}' for reward in curve)} |", flush=True)


if __name__ == "__main__":
    main()
