"""Parts of `gpu.py` that need no generator: how fast bytes leave and reach the device, and how fast the trainer alone computes."""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from random_models import (
    DEVICE,
    GPU,
    GROUP,
    PROMPT_TOKENS,
    Shape,
    drawn_groups,
    empty_cache,
    job,
    random_model,
    save_structure,
)
from torch.profiler import ProfilerActivity, profile

from streamrl.errors import UserError
from streamrl.spec import parse_job
from streamrl_workers.trainer.engines import torch_engine
from streamrl_workers.trainer.engines.setup import EngineSetup

COPY_BYTES = 2**31 if GPU else 2**24
"""In bfloat16."""
PASSES = (8192, 16_384, 32_768) if GPU else (512,)
"""Tokens of a pass."""
COMPILED = (False, True) if GPU else (False,)
"""On a processor a trial of the script would be one of the compiler."""
STEPS, FEWEST_STEPS = 4, 2
KERNELS = 15
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s, by a part of the device's name."""
_ATTENTION = ("flash", "fmha", "attention", "sdpa")


def copies(shape: Shape, *, until_s: float) -> None:
    """One table: to main memory as weights are published, and from shared memory as generators load them."""
    del shape, until_s
    weights = torch.randn(COPY_BYTES // 2, device=DEVICE)
    half = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, pin_memory=GPU)
    target = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        shared = torch.from_file(file.name, shared=True, size=COPY_BYTES // 2, dtype=torch.bfloat16).fill_(1)
        ways: dict[str, Callable[[], object]] = {
            '`.to("cpu", bfloat16)`, pageable': lambda: weights.to("cpu", torch.bfloat16),
            "cast on the device, copied into pinned memory": lambda: half.copy_(weights.to(torch.bfloat16)),
            "from shared memory to the device, pageable": lambda: target.copy_(shared),
            "the same through pinned memory": lambda: target.copy_(half.copy_(shared)),
        }
        print(f"{COPY_BYTES / 1e9:.1f} GB in bfloat16\n\n| copy | GB/s |\n|---|---|")
        for name, copy in ways.items():
            print(f"| {name} | {COPY_BYTES / 1e9 / statistics.median(_times(copy)):.1f} |", flush=True)


def _times(work: Callable[[], object], *, count: int = 5) -> Iterator[float]:
    work()
    for _ in range(count):
        began_s = time.perf_counter()
        work()
        if GPU:
            torch.cuda.synchronize()
        yield time.perf_counter() - began_s


def rates(shape: Shape, *, until_s: float) -> None:
    """A table of the trainer alone, a line as soon as it is known; then the kernels of the last pass without a compiler."""
    print("| tokens of a pass | blocks | tokens/s | of the peak | peak memory |\n|---|---|---|---|---|")
    kernels: list[str] = []
    longest_s = 0.0
    for tokens in PASSES:
        for compiled in COMPILED:
            if time.monotonic() + longest_s > until_s:
                print(f"\nno time is left from {tokens:,} tokens on")
                return
            began_s = time.monotonic()
            found = _measured(shape, tokens=tokens, compiled=compiled, until_s=until_s)
            print(f"| {tokens:,} | {'compiled' if compiled else 'as they are'} | {found.pop(0)} |", flush=True)
            kernels = found or kernels
            longest_s = max(longest_s, time.monotonic() - began_s)
    print("\n".join(["", *kernels]))


def _measured(shape: Shape, *, tokens: int, compiled: bool, until_s: float) -> list[str]:
    """The rest of the line, and the kernels of one step where nothing is compiled."""
    with tempfile.TemporaryDirectory() as scratch:
        save_structure(shape, Path(scratch))
        model = random_model(Path(scratch))
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(scratch)
        del model
        spec = parse_job(job(shape, Path(scratch), microBatchTokens=tokens, compile=compiled)).spec
        _forget()
        try:
            engine = torch_engine.create(EngineSetup(spec=spec, model_path=scratch, threads=None))
            step_s, kernels = _trained(engine, shape, profiled=not compiled, until_s=until_s)
        except UserError as error:
            return [f"{error} | | "]
        finally:
            engine = None
            memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if GPU else ""
            _forget()
    rate = shape.groups * GROUP * (PROMPT_TOKENS + shape.tokens) / step_s
    peak = next((flops for name, flops in PEAKS.items() if GPU and name in torch.cuda.get_device_name()), None)
    share = f"{6 * parameters * rate / peak:.1%}" if peak else ""
    return [f"{rate:,.0f} | {share} | {memory}", *kernels]


def _trained(engine: Any, shape: Shape, *, profiled: bool, until_s: float) -> tuple[float, list[str]]:  # noqa: ANN401
    """Seconds of a step, behind the first, and the table of its kernels."""
    groups, times = list(drawn_groups(shape)), list[float]()

    def step(number: int) -> None:
        began_s = time.monotonic()
        engine.begin_step(number, attempt=1)
        engine.add(groups)
        engine.finish_step()
        times.append(time.monotonic() - began_s)

    for number in range(STEPS):
        if number >= FEWEST_STEPS and time.monotonic() + times[-1] > until_s:
            break
        step(number)
    step_s = statistics.median(times[1:])
    if not profiled:
        return step_s, []
    with profile(activities=[ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU]) as profiler:
        step(len(times))
    events = profiler.key_averages()
    by = "self_cuda_time_total" if GPU else "self_cpu_time_total"
    attention = sorted({event.key for event in events if any(word in event.key.lower() for word in _ATTENTION)})
    table = events.table(sort_by=by, row_limit=KERNELS, max_name_column_width=80)
    return step_s, [f"attention: {', '.join(attention) or 'no kernel of its own'}", "```", table, "```"]


def _forget() -> None:
    gc.collect()
    empty_cache()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
