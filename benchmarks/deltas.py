"""What a version costs as deltas: its bytes as a share of full tensors, beside what others send, and the time to make and apply them.

    python benchmarks/deltas.py [--megabytes 64] [--rates 1e-6 3e-6 1e-5] [--real]

Steps of Adam on synthetic weights and gradients, in bfloat16 and float32. With `--real` the steps of `examples/chain-sum.yaml` too, run by `streamrl run`
with a checkpoint after each: the trainer keeps float32 and publishes that, or with `precision: BF16` what it rounds to.
Beside them: the xor of a whole tensor by zstd, level 1 (as slime sends it), and index (4 bytes) and value of each changed element.
Speeds are of the whole tensor's bytes, the best of `--repeats`.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from run_folders import EXAMPLE, start
from safetensors import safe_open

from streamrl_workers.models.published import as_bytes
from streamrl_workers.weights.delta import apply, encode, zstd
from streamrl_workers.weights.hashing import TensorBytes, bytes_hash

INDEX_BYTES = 4
MODEL = "model."
SETTLED_STEPS = 5
"""Of the example: its learning rate rises before."""

WARM_UP_STEPS = 300
"""Of the example's model, before the run: enough for rewards that differ."""

Version = Mapping[str, TensorBytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one version after another; bytes as shares of all its tensors in full."""

    changed: float  # share of elements
    delta: float
    xor_whole: float
    index_value: float
    encode_gbps: float
    apply_gbps: float


def cost(before: Version, after: Version, *, repeats: int) -> Cost:
    full = sum(tensor.data.nbytes for tensor in after.values())
    elements = changed = delta = xor_whole = index_value = 0
    encode_s = apply_s = 0.0
    for name, new in after.items():
        width = torch.empty(0, dtype=getattr(torch, new.dtype)).element_size()
        old_bytes, new_bytes = before[name].data.cast("B"), new.data.cast("B")
        a, b = (np.frombuffer(data, dtype=f"<u{width}") for data in (old_bytes, new_bytes))
        different = int(np.count_nonzero(a != b))
        elements, changed = elements + len(a), changed + different
        xor_whole += min(len(zstd.compress((a ^ b).tobytes(), 1)), new_bytes.nbytes)
        index_value += min(different * (INDEX_BYTES + width), new_bytes.nbytes)
        names = {"base_hash": bytes_hash(old_bytes), "new_hash": bytes_hash(new_bytes)}
        if names["base_hash"] == names["new_hash"]:
            continue
        took_s, made = best(lambda: encode(old_bytes, new_bytes, width=width, **names), repeats=repeats)  # noqa: B023 - called here
        encode_s += took_s
        delta += new_bytes.nbytes if made is None else len(made)
        if made is not None:
            into = memoryview(bytearray(len(new_bytes)))
            took_s, _ = best(lambda: apply(memoryview(made), base=old_bytes, into=into, **names), repeats=repeats)  # noqa: B023
            assert into == new_bytes, "not the same bytes"
            apply_s += took_s
    return Cost(
        changed=changed / elements,
        delta=delta / full,
        xor_whole=xor_whole / full,
        index_value=index_value / full,
        encode_gbps=full / encode_s / 1e9,
        apply_gbps=full / apply_s / 1e9 if apply_s else float("nan"),
    )


def best(call, *, repeats: int):  # noqa: ANN001, ANN201 - of any type
    """(fewest seconds, the result)."""
    taken = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        result = call()
        taken.append(time.perf_counter() - begun_s)
    return min(taken), result


def synthetic(rate: float, *, elements: int, steps: int = 30) -> Iterator[dict[str, torch.Tensor]]:
    """The last two versions of a tensor after so many steps of Adam, with gradients that are noise."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(elements) * 0.02)
    optimiser = torch.optim.Adam([weights], lr=rate)
    for step in range(1, steps + 1):
        weights.grad = torch.randn(elements) * 1e-3
        optimiser.step()
        if step >= steps - 1:
            yield {"weights": weights.detach().clone()}


def real(rate: float, *, scratch: Path, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The trainer's weights after each of the example's steps behind the first ones."""
    folder = scratch / f"run-{rate:g}"
    changes = {
        "pipeline.steps": steps,
        "trainer.learningRate": f"{rate:.8f}",
        "trainer.warmUpSteps": SETTLED_STEPS,
        "storage.checkpoints.intervalSteps": 1,
        "storage.checkpoints.keepLast": steps,
        "task.evaluation.intervalSteps": 1_000_000,
        "model.scratch.warmUp.steps": WARM_UP_STEPS,
    }
    start(
        EXAMPLE,
        folder=folder,
        changes=[f"spec.{key}={value}" for key, value in changes.items()],
        XDG_CACHE_HOME=str(scratch),
    )
    for directory in sorted(folder.rglob("checkpoints/step-*"))[SETTLED_STEPS:]:
        with safe_open(directory / "rank-00000.safetensors", "pt") as file:
            yield {name.removeprefix(MODEL): file.get_tensor(name) for name in file.keys() if name.startswith(MODEL)}  # noqa: SIM118 - no mapping


def published(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Version:
    return {name: as_bytes(tensor.to(dtype)) for name, tensor in tensors.items()}


def report(what: str, rate: float, versions: Iterable[Mapping[str, torch.Tensor]], *, repeats: int) -> None:
    versions = list(versions)
    for dtype in (torch.bfloat16, torch.float32):
        costs = [
            cost(published(before, dtype), published(after, dtype), repeats=repeats)
            for before, after in pairwise(versions)
        ]
        mean = {key: statistics.fmean(getattr(one, key) for one in costs) for key in Cost.__slots__}
        print(
            f"| {what} | {str(dtype).removeprefix('torch.')} | {rate:g} | {mean['changed']:.1%} | **{mean['delta']:.2%}** | {mean['xor_whole']:.2%} "
            f"| {mean['index_value']:.2%} | {mean['encode_gbps']:.2f} GB/s | {mean['apply_gbps']:.2f} GB/s |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="of the synthetic weights in bfloat16")
    parser.add_argument("--rates", type=float, nargs="*", default=[1e-6, 3e-6, 1e-5])
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--real-rates", type=float, nargs="+", default=[1e-6, 1e-5, 2e-4])
    parser.add_argument("--steps", type=int, default=10, help="of the example")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(
        "| steps of | published | learning rate | changed | delta | xor of the whole, zstd | index and value | made at | applied at |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for rate in args.rates:
        report("Adam, synthetic", rate, synthetic(rate, elements=args.megabytes * 10**6 // 2), repeats=args.repeats)
    if args.real:
        with tempfile.TemporaryDirectory() as scratch:
            for rate in args.real_rates:
                report("the example", rate, real(rate, scratch=Path(scratch), steps=args.steps), repeats=args.repeats)


if __name__ == "__main__":
    main()
