"""Do StreamRL and TRL make the same update of the same samples? One optimiser step of one batch, in float32.

    python benchmarks/peers/same_batch.py [--task words] [--seed 0]

TRL's trainer draws the batch and takes a step, as in `parity.py`; it writes what it saw and did. StreamRL's engine is given the same model,
tokens and rewards. Printed: losses and norms of the gradient, the largest differences of advantages, gradient and update, and the angle
between both sides' gradients and updates.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from compare import Task, run_trl
from materials import job_materials
from parity import JOB, TASKS

from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec
from streamrl_workers.models.load import load_model
from streamrl_workers.stream.packing import pack_float32, pack_int32
from streamrl_workers.trainer.algorithms import create_algorithm
from streamrl_workers.trainer.engines.packing import pack_sample
from streamrl_workers.trainer.engines.process_group import SingleRank
from streamrl_workers.trainer.engines.torch_engine import TorchEngine, build_models
from streamrl_workers.trainer.engines.worker import RankWorker

Tensors = Mapping[str, torch.Tensor]
Row = tuple[tuple[int, ...], tuple[int, ...], float]
"""Prompt, completion, advantage."""
PASS_SAMPLES = 64


def main() -> None:
    """Both steps, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="words")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, prompts, spec = job_materials(JOB, name=args.task, changes=[f"spec.seed={args.seed}", *TASKS[args.task]])
    task = Task(name=args.task, job=JOB, model=model, prompts=prompts, spec=spec)
    settings = argparse.Namespace(ranks=1, threads=1, micro_batch=256, continuous=False, record=True)
    with tempfile.TemporaryDirectory() as scratch:
        run_trl(task, Path(scratch), steps=1, args=settings)
        theirs = torch.load(Path(scratch) / "trl.step")
        moved = _less(_weights(Path(scratch) / "trl.model"), _weights(model))
    groups = _groups(_rows(theirs["passes"]), size=spec.task.group_size)
    gradients, numbers, after = _our_step(groups, model=model, spec=spec)
    print(
        f"{len(groups)} groups of {spec.task.group_size}, task {args.task}, seed {args.seed}, learning rate {numbers['learning_rate']:.1e}"
    )
    their_loss = sum(float(batch["loss"]) for batch in theirs["passes"])
    print(f"loss: StreamRL {numbers['loss']:+.3e}, TRL {their_loss:+.3e} (at ratio 1 the sum of advantages)")
    _compare("gradient, not clipped", gradients, theirs["gradients"])
    _compare("update of the weights", _less(after, _weights(model)), moved)


def _rows(passes: list[Tensors]) -> list[Row]:
    found = []
    for batch in passes:
        for row, advantage in enumerate(batch["advantages"].tolist()):
            prompt, tokens = (
                tuple(batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()].tolist())
                for part in ("prompt", "completion")
            )
            found.append((prompt, tokens, advantage))
    return found


def _groups(rows: list[Row], *, size: int) -> list[pb.Group]:
    """Rewards are 0 or 1 in these tasks, so an advantage tells them; where all are alike either will do."""
    by_prompt: dict[tuple[int, ...], list[pb.Sample]] = defaultdict(list)
    for prompt, tokens, advantage in rows:
        by_prompt[prompt].append(
            pb.Sample(
                sample_index=len(by_prompt[prompt]),
                prompt_tokens=pack_int32(prompt),
                tokens=pack_int32(tokens),
                logprobs=pack_float32([0.0] * len(tokens)),  # `_our_step` has them
                spans=[pb.VersionSpan(tokens=len(tokens))],
                finish_reason="stop",
                reward=float(advantage > 0),
            )
        )
    for number, samples in enumerate(by_prompt.values()):
        assert len(samples) == size, f"two groups have one prompt: {len(samples)} samples"
        for sample in samples:
            sample.group_id = number
    return [pb.Group(group_id=number, samples=samples) for number, samples in enumerate(by_prompt.values())]


def _our_step(groups: list[pb.Group], *, model: Path, spec: RLJobSpec) -> tuple[Tensors, dict[str, float], Tensors]:
    """Gradient as it is before the clip, metrics, and the weights behind the update."""
    models = build_models(spec, model_path=str(model), device=torch.device("cpu"))
    worker = RankWorker(models, spec=spec)
    samples = [sample for group in groups for sample in group.samples]
    for begin in range(0, len(samples), PASS_SAMPLES):  # TRL's ratio is 1: the policy itself has drawn them
        part = samples[begin : begin + PASS_SAMPLES]
        for sample, known in zip(
            part,
            worker.prepare([packed for one in part for packed in pack_sample(one, step=0, attempt=0)]),
            strict=True,
        ):
            sample.logprobs = pack_float32(known["proximal_N"])
    engine = TorchEngine(SingleRank(worker), spec=spec, algorithm=create_algorithm(spec))
    engine.begin_step(0, attempt=0)
    engine.add(groups)
    numbers = engine.finish_step()
    after = {name: parameter.detach().clone() for name, parameter in models.model.named_parameters()}
    clipped = max(1.0, numbers["gradient_norm"] / spec.trainer.gradient_clip_norm)
    return {name: gradient * clipped for name, gradient in worker.gradients().items()}, numbers, after


def _compare(what: str, ours: Tensors, theirs: Tensors) -> None:
    """Both as one long vector."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    mine, other = (torch.cat([side[name].flatten().double() for name in sorted(side)]) for side in (ours, theirs))
    ratio = float(mine.norm() / other.norm())
    apart = float((mine / mine.norm() - other / other.norm()).norm())
    print(f"{what}: norms {mine.norm():.6f} and {other.norm():.6f}, ratio {ratio:.6f}; directions apart by {apart:.1e}")


def _weights(folder: Path) -> Tensors:
    return {name: parameter.detach() for name, parameter in load_model(str(folder)).named_parameters()}


def _less(after: Tensors, before: Tensors) -> Tensors:
    return {name: after[name] - before[name] for name in before}


if __name__ == "__main__":
    main()
