"""Parts of `gpu.py` that need no generator: how fast bytes leave and reach the device, and how fast the trainer alone computes."""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from random_models import (
    DEVICE,
    GPU,
    GROUP,
    PRECISION,
    PROMPT_TOKENS,
    SHAPES,
    Shape,
    drawn_groups,
    empty_cache,
    job,
    random_model,
    save_structure,
)
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_engine import save_tokenizer

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec import parse_job
from streamrl_workers.models.load import DTYPES
from streamrl_workers.stream.packing import unpack_int32
from streamrl_workers.trainer.engines import torch_engine
from streamrl_workers.trainer.engines.setup import EngineSetup
from streamrl_workers.trainer.engines.torch_engine import TorchEngine

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


def rows(shape: Shape, *, until_s: float) -> None:
    """A table of the two layouts; on a processor `Packed` is the plain path by document, on a GPU the kernel of torch."""
    groups = list(_uneven(shape))
    tokens = sum(len(one.prompt_tokens) + len(one.tokens) for group in groups for one in group.samples) // 4
    print(
        f"{tokens:,} tokens a step\n\n| layout | tokens/s | peak memory | loss | gradient norm |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as scratch:
        save_structure(shape, Path(scratch))
        random_model(Path(scratch)).save_pretrained(scratch)
        for layout in ("Padded", "Packed"):
            _forget()
            spec = parse_job(job(shape, Path(scratch), microBatchTokens=PASSES[0], microBatchLayout=layout)).spec
            engine = torch_engine.create(EngineSetup(spec=spec, model_path=scratch, threads=None))
            first, times = _step(engine, groups, number=0), list[float]()
            while len(times) < STEPS and (not times or time.monotonic() + times[-1] < until_s):
                began_s = time.monotonic()
                _step(engine, groups, number=len(times) + 1)
                times.append(time.monotonic() - began_s)
            memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if GPU else ""
            numbers = f"{first['loss']:.6f} | {first['gradient_norm']:.6f}"
            print(f"| {layout} | {tokens / statistics.median(times):,.0f} | {memory} | {numbers} |", flush=True)
            del engine


def _uneven(shape: Shape) -> Iterator[pb.Group]:
    """The drawn groups, their answers cut to lengths that differ."""
    random = Random(0)
    for group in drawn_groups(shape):
        for sample in group.samples:
            count = random.randint(1, shape.tokens)
            sample.tokens, sample.logprobs = sample.tokens[: 4 * count], sample.logprobs[: 4 * count]
            sample.spans[0].tokens = count
        yield group


def _step(engine: TorchEngine, groups: Sequence[pb.Group], *, number: int) -> dict[str, float]:
    engine.begin_step(number, attempt=1)
    engine.add(groups)
    return engine.finish_step()


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 64},
    "gpt_oss": {"num_local_experts": 8},
}
"""What a configuration says beside the common sizes, by model type."""


def experts(shape: Shape, *, until_s: float) -> None:
    """A line for each family: mean log-prob of the same tokens, of the trainer and of transformers, before and after an update."""
    del until_s
    print("| family | version | trainer | transformers | difference |\n|---|---|---|---|---|")
    tiny = SHAPES["tiny"]
    groups = list(_uneven(tiny))
    for family, own in EXPERTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            before, after = Path(scratch) / "before", Path(scratch) / "after"
            _save_experts(family, own, before)
            after.mkdir()
            _forget()
            spec = parse_job(job(tiny, before, microBatchTokens=512)).spec
            engine = torch_engine.create(EngineSetup(spec=spec, model_path=str(before), threads=None))
            for version, folder in enumerate((before, after)):
                if version:
                    _step(engine, groups, number=0)
                    engine.export(folder)
                ours = -engine.held_out_loss([sample for group in groups for sample in group.samples])
                theirs = _mean_logprob(folder, groups)
                print(f"| {family} | {version} | {ours:.6f} | {theirs:.6f} | {ours - theirs:.6f} |", flush=True)
            del engine


def _save_experts(family: str, own: dict[str, Any], folder: Path) -> None:
    """Two layers with experts, and random weights."""
    config = AutoConfig.for_model(
        family,
        **{"vocab_size": SHAPES["tiny"].vocabulary, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2},
        **{"max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        **own,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    save_tokenizer(folder)


@torch.no_grad()
def _mean_logprob(folder: Path, groups: Sequence[pb.Group]) -> float:
    """Of the answers' tokens by transformers, each sample alone, in the trainer's precision."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[PRECISION]).to(DEVICE).eval()
    found = []
    for group in groups:
        for sample in group.samples:
            prompt, answer = unpack_int32(sample.prompt_tokens), unpack_int32(sample.tokens)
            tokens = torch.tensor([*prompt, *answer], device=DEVICE)
            logprobs = model(tokens.unsqueeze(0)).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found += logprobs.gather(1, tokens[len(prompt) :].unsqueeze(1)).flatten().tolist()
    return statistics.fmean(found)


def _forget() -> None:
    gc.collect()
    empty_cache()
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
