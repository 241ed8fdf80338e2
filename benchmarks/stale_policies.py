"""What samples of a policy that is exactly S steps old teach, correction by correction.

    python benchmarks/stale_policies.py [--staleness 8 32] [--steps 60] [--seeds 0] [--only m2po trajectoryBalance] [--set ...]

The README's job in one process: its model, task, rewards and trainer engine, but each step's samples are drawn by the policy of S steps
before (the initial one while the run is young). A real run has such samples only where its generators are far ahead of the trainer.
Prints held-out reward of greedy answers by step; then means over the steps of what the corrections did.
"""

import argparse
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from run_folders import EXAMPLE
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_cli.jobfile import load_job
from streamrl_workers.models.load import load_model, load_tokenizer
from streamrl_workers.models.prepare import prepare
from streamrl_workers.rewards.registry import Part, make_parts
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.tasks.dataset import Item, MixedDataset, open_dataset
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker

CACHE = Path.home() / ".cache" / "streamrl" / "models"
HELD_OUT = 256
SHOWN = ("behaviour_kl", "ratio_max", "clip_fraction", "masked_fraction", "correction_weight_mean", "gradient_norm")

Weights = Mapping[str, torch.Tensor]

ON_POLICY = "on policy"
VARIANTS: Mapping[str, str] = {
    "twoSidedClip": "{grpo: {}}",
    "truncatedImportance": "{grpo: {}, correction: {truncatedImportance: {}}}",
    "m2po": "{grpo: {}, correction: {m2po: {}}}",
    "trajectoryBalance": "{trajectoryBalance: {beta: 0.005}}",
    "trajectoryBalance, replay": "{trajectoryBalance: {beta: 0.005, replay: {sharePercent: 33}}}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Draws with any weights of one model."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    parts: Sequence[Part]
    max_tokens: int

    def groups(self, items: Sequence[Item], *, weights: Weights, size: int, step: int, first_id: int) -> list[pb.Group]:
        """Groups of `size` samples."""
        texts = [item.prompt for item in items for _ in range(size)]
        drawn = self._drawn(texts, weights=weights, sample=True)
        found = []
        for number, item in enumerate(items):
            group_id = first_id + number
            samples = [
                pb.Sample(
                    group_id=group_id,
                    sample_index=index,
                    prompt_tokens=pack_int32(self.tokenizer(item.prompt).input_ids),
                    tokens=pack_int32(tokens),
                    logprobs=pack_float32(logprobs),
                    spans=[pb.VersionSpan(tokens=len(tokens), step=step, attempt=1)],
                    generator_id="generator-local-0",
                    reward=self._reward(tokens, item),
                )
                for index, (tokens, logprobs) in enumerate(drawn[number * size : (number + 1) * size])
            ]
            found.append(pb.Group(group_id=group_id, step=step, samples=samples))
        return found

    def held_out(self, items: Sequence[Item], *, weights: Weights) -> float:
        """Mean reward of greedy answers."""
        drawn = self._drawn([item.prompt for item in items], weights=weights, sample=False)
        return statistics.fmean(self._reward(tokens, item) for (tokens, _), item in zip(drawn, items, strict=True))

    def _reward(self, tokens: Sequence[int], item: Item) -> float:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return sum(part.value(text, item) for part in self.parts)

    @torch.no_grad()
    def _drawn(self, texts: Sequence[str], *, weights: Weights, sample: bool) -> list[tuple[list[int], list[float]]]:
        """Tokens and log-probs; prompts of one length go together, so nothing is padded."""
        self.model.load_state_dict(weights)
        found: dict[int, tuple[list[int], list[float]]] = {}
        prompts = [self.tokenizer(text).input_ids for text in texts]
        for length in sorted({len(prompt) for prompt in prompts}):
            places = [place for place, prompt in enumerate(prompts) if len(prompt) == length]
            made = self.model.generate(
                torch.tensor([prompts[place] for place in places]),
                do_sample=sample,
                max_new_tokens=self.max_tokens,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=self.tokenizer.eos_token_id,
                return_dict_in_generate=True,
                output_logits=True,
                **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
            )
            tokens_BT = made.sequences[:, length:]
            logprobs_BTV = torch.log_softmax(torch.stack(made.logits, dim=1), -1)
            logprobs_BT = logprobs_BTV.gather(-1, tokens_BT.unsqueeze(-1)).squeeze(-1)
            for place, tokens, logprobs in zip(places, tokens_BT.tolist(), logprobs_BT.tolist(), strict=True):
                ended = self.tokenizer.eos_token_id in tokens
                count = tokens.index(self.tokenizer.eos_token_id) + 1 if ended else len(tokens)
                found[place] = tokens[:count], logprobs[:count]
        return [found[place] for place in range(len(texts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one run showed."""

    held_out: Mapping[int, float]  # by steps done
    metrics: Mapping[str, float]  # means over the steps


def run(spec: RLJobSpec, *, model: str, sampler: Sampler, dataset: MixedDataset, staleness: int, every: int) -> Curve:
    """Train with samples of the policy of `staleness` steps before."""
    torch.manual_seed(spec.seed)
    models = build_models(spec, model_path=model, device=torch.device("cpu"))
    engine = TorchEngine(SingleRank(RankWorker(models, spec=spec)), spec=spec, algorithm=create_algorithm(spec))
    policies: deque[Weights] = deque([_copy(models.model)], maxlen=staleness + 1)
    held_out_items = [dataset.item("held_out", index) for index in range(HELD_OUT)]
    size, batch = spec.task.group_size, spec.pipeline.batch_groups
    curve, told = {0: sampler.held_out(held_out_items, weights=policies[-1])}, []
    for step in range(spec.pipeline.steps):
        items = [dataset.item("train", step * batch + number) for number in range(batch)]
        version = max(0, step - staleness)
        groups = sampler.groups(items, weights=policies[0], size=size, step=version, first_id=step * batch)
        engine.begin_step(step, attempt=1)
        engine.add(groups)
        told.append(engine.finish_step())
        policies.append(_copy(models.model))
        if (step + 1) % every == 0:
            curve[step + 1] = sampler.held_out(held_out_items, weights=policies[-1])
    return Curve(held_out=curve, metrics={name: statistics.fmean(one[name] for one in told) for name in SHOWN})


def _copy(model: torch.nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def variants(staleness: Sequence[int], only: Sequence[str]) -> Iterator[tuple[str, int, str]]:
    """Name, S, algorithm."""
    yield ON_POLICY, 0, VARIANTS["twoSidedClip"]
    for bound in staleness:
        yield from ((f"{name}, S = {bound}", bound, VARIANTS[name]) for name in only)


def main() -> None:
    """Run them, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--groups", type=int, default=64, help="a step")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=list(VARIANTS))
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of every job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name, bound, algorithm in variants(args.staleness, args.only):
            changes = [
                f"spec.seed={seed}",
                f"spec.algorithm={algorithm}",
                f"spec.pipeline.steps={args.steps}",
                f"spec.pipeline.batchGroups={args.groups}",
                *args.set,
            ]
            spec = load_job(EXAMPLE, overrides=changes).spec
            model = str(prepare(spec, cache_dir=CACHE, base_dir=EXAMPLE.parent, report=lambda _: None))
            dataset = open_dataset(spec.task, seed=seed, base_dir=EXAMPLE.parent)
            sampler = Sampler(
                model=load_model(model).eval(),
                tokenizer=load_tokenizer(model),
                parts=make_parts(spec.task.rewards, verify=dataset.only.verify, base_dir=EXAMPLE.parent),
                max_tokens=spec.task.sampling.max_tokens,
            )
            curve = run(spec, model=model, sampler=sampler, dataset=dataset, staleness=bound, every=args.every)
            rewards = " | ".join(f"{reward:.3f}" for reward in curve.held_out.values())
            means = ", ".join(f"{metric} {value:.4g}" for metric, value in curve.metrics.items())
            print(f"| {seed} | {name} | {rewards} |\n# {means}", flush=True)


if __name__ == "__main__":
    main()
