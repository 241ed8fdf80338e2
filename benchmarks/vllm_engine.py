"""Tokens a second of a generator with vLLM beside bare `AsyncLLM`, and how long an update of weights stops it.

    .venv-vllm/bin/python benchmarks/vllm_engine.py [--pairs 8] [--concurrency 64] [--requests 256] [--hidden 256] [--layers 4]

One vLLM serves both, in turn, so both have the same processes and the same noise. Bare: `AsyncLLM.generate`, a task a request, every token
taken. Ours: the generator's engine loop and outbox around the engine, drained into messages as the link would. Same prompts, seeds and limits;
random weights, so answers are as long as they may be or end at random. The interval is Student's, over the pairs.
"""

import argparse
import asyncio
import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import VllmEngineSpec
from streamrl_cli.reporting.comparison import mean
from streamrl_workers.generator.engine_loop import EngineLoop
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.generator.outbox import GeneratorOutbox
from streamrl_workers.metrics.bubbles import Recorder
from streamrl_workers.models.published import Parameters
from streamrl_workers.weights.address import Route
from streamrl_workers.weights.hashing import TensorBytes, tensors_hash

MAX_TOKENS = 192
LEAST_PAIRS = 3

Alone = Callable[[Sequence[pb.SampleRequest]], Awaitable[float]]
"""Tokens a second of an engine with nothing of the generator around it."""


def main() -> None:
    """Measure, print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("pairs", 8), ("concurrency", 64), ("requests", 256), ("hidden", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), hidden=args.hidden, layers=args.layers)
        spec = VllmEngineSpec.model_validate({"maxConcurrency": args.concurrency, "kvCacheBytes": "1Gi"})
        engine: Any = engine_kind("vllm").create(EngineOptions(spec=spec, model_path=scratch, threads=1))
        try:
            weights = Parameters(model).snapshot()
            engine.load_weights(version=0, tensors=weights)
            asyncio.run(measure(engine, weights, args))
        finally:
            engine.close()


async def measure(engine: Any, weights: dict[str, TensorBytes], args: argparse.Namespace) -> None:  # noqa: ANN401
    """All pairs with one engine, then updates."""
    generator = Generator(engine, weights)
    await generator.start()
    alone = partial(bare, engine, concurrency=args.concurrency)
    rates = await compare(generator, alone, pairs=args.pairs, requests=args.requests)
    print("\n".join(["", *rates.table("bare AsyncLLM")]))
    updated = await updates(generator, count=10, requests=args.requests)
    size = sum(tensor.data.nbytes for tensor in weights.values())
    pauses_ms = [1e3 * update.pause_s for update in updated]
    print(f"update of {size / 2**20:.0f} MiB under load: paused {statistics.median(pauses_ms):.0f} ms (median of {len(pauses_ms)}, {min(pauses_ms):.0f}–{max(pauses_ms):.0f})")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Tokens a second, pair by pair."""

    alone: list[float]
    ours: list[float]

    def table(self, name: str) -> list[str]:
        """In Markdown; `name`: of what ran alone."""
        ratios = [ours / alone for ours, alone in zip(self.ours, self.alone, strict=True)]
        low, high = interval(ratios)
        rows = [
            f"| {title} | {statistics.median(rates):,.0f} | {min(rates):,.0f}–{max(rates):,.0f} |"
            for title, rates in ((name, self.alone), ("generator", self.ours))
        ]
        ratio = f"ratio {statistics.mean(ratios):.3f}, 95 % of it {low:.3f} to {high:.3f}, {len(ratios)} pairs"
        return ["| | tokens/s | range |", "|---|---|---|", *rows, "", ratio]


async def compare(
    generator: "Generator",
    alone: Alone,
    *,
    pairs: int,
    requests: int,
    max_tokens: int = MAX_TOKENS,
    until_s: float = math.inf,
) -> Rates:
    """Both sides with the same requests, in turn. None begins behind `until_s` of the monotonic clock once there are a few pairs."""
    rates = Rates(alone=[], ours=[])
    for pair in range(pairs + 1):
        if pair > LEAST_PAIRS and time.monotonic() > until_s:
            break
        work = [sample(requests * pair + place, max_tokens=max_tokens) for place in range(requests)]
        sides = (alone(work), generator.serve(work))
        first, second = (0, 1) if pair % 2 else (1, 0)
        found = {first: await sides[first], second: await sides[second]}
        if pair:  # the first warms both up
            rates.alone.append(found[0])
            rates.ours.append(found[1])
            print(f"# pair {pair}: alone {found[0]:,.0f}, generator {found[1]:,.0f} tokens/s", flush=True)
    return rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What one update of weights took."""

    load_s: float  # of the engine's call, copy included
    pause_s: float  # of it, nothing was generated for


async def updates(
    generator: "Generator", *, count: int, requests: int, max_tokens: int = MAX_TOKENS, until_s: float = math.inf
) -> list[Updated]:
    """So many updates under load; but for the first, none begins behind `until_s` of the monotonic clock."""
    work = asyncio.create_task(
        generator.serve([sample(10**6 + place, max_tokens=max_tokens) for place in range(requests)])
    )
    found = []
    for version in range(1, count + 1):
        if found and time.monotonic() > until_s:
            break
        await asyncio.sleep(0.3)
        found.append(await generator.update(version))
    await work
    return found


async def bare(engine: Any, requests: Sequence[pb.SampleRequest], *, concurrency: int) -> float:  # noqa: ANN401
    """Tokens a second of `AsyncLLM.generate`, in vLLM's own thread."""
    from vllm.inputs import tokens_input

    submissions = []
    for request in requests:
        sequence = engine._requests.admit(request, version=0)
        submissions.append(engine._submission(sequence))

    async def work() -> float:
        gate, tokens, began_s = asyncio.Semaphore(concurrency), 0, time.monotonic()

        async def one(submission: Any) -> None:  # noqa: ANN401
            nonlocal tokens
            async with gate:
                async for output in engine._core._llm.generate(
                    tokens_input(submission.tokens), submission.params, request_id=f"bare-{submission.lease}"
                ):
                    tokens += len(output.outputs[0].token_ids)

        await asyncio.gather(*(one(submission) for submission in submissions))
        return tokens / (time.monotonic() - began_s)

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), engine._core._loop))


class Generator:
    """The generator's engine loop and outbox; messages are made as for the link, and dropped."""

    def __init__(self, engine: Any, weights: dict[str, TensorBytes]) -> None:  # noqa: ANN401
        self.engine = engine
        self._hash = tensors_hash(weights)
        self._outbox = GeneratorOutbox()

        async def pull(_: Route) -> dict[str, TensorBytes]:
            return weights

        self._loop = EngineLoop(engine, pull=pull, outbox=self._outbox, recorder=Recorder(sink=None, metrics=None))
        self._loaded: dict[int, float] = {}  # version -> seconds of the engine's call
        self._ended = 0
        self._drained = asyncio.Event()

    async def start(self) -> None:
        """Run the loop and the drain until the process ends; load version 0."""
        self._outbox.open()
        self._loop.connected()
        self._tasks = [asyncio.create_task(self._loop.run()), asyncio.create_task(self._drain())]
        await self.update(0)

    async def serve(self, requests: Sequence[pb.SampleRequest]) -> float:
        """Tokens a second until all have ended."""
        tokens, ended, began_s = self._outbox.tokens, self._ended, time.monotonic()
        self._loop.issue(requests)
        while self._ended < ended + len(requests):
            self._drained.clear()
            await self._drained.wait()
        return (self._outbox.tokens - tokens) / (time.monotonic() - began_s)

    async def update(self, step: int) -> Updated:
        """Until these weights are in the engine."""
        self._loop.announce(
            pb.WeightsAvailable(version=pb.VersionName(attempt=1, step=step, hash=self._hash), address="here:1")
        )
        while step not in self._loaded:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        load_s = self._loaded[step]
        return Updated(load_s=load_s, pause_s=load_s - self.engine.load_parts.get("copy", 0.0))

    async def _drain(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PARTIALS_S):
                    await self._outbox.filled.wait()
            for event in self._outbox.pop(running=True):
                event.SerializeToString()
                self._ended += sum(bool(item.finish_reason) for item in event.progress.items)
                if event.HasField("weights_loaded"):
                    self._loaded[event.weights_loaded.version.step] = event.weights_loaded.load_s
            self._drained.set()


_PARTIALS_S = 0.5
"""Between two messages with the gains of running requests."""


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of the mean, at 95 %; of at least two."""
    found = mean(ratios)
    assert found is not None and found.half_width is not None
    return found.value - found.half_width, found.value + found.half_width


def sample(lease: int, *, max_tokens: int = MAX_TOKENS) -> pb.SampleRequest:
    """Groups of eight share their prompt."""
    prompt = " ".join(str((lease // 8 * 7919 + place) % 100) for place in range(24))
    return pb.SampleRequest(
        lease=lease,
        group_id=lease // 8,
        prompt=prompt,
        seed=lease,
        sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=max_tokens),
    )


def save_tokenizer(folder: Path) -> None:
    """Of digits; its end comes after some hundred tokens in a vocabulary of 256 words."""
    vocab = {char: index for index, char in enumerate("0123456789 ")} | {"<end>": 255}
    core = Tokenizer(models.WordLevel(vocab, unk_token="0"))  # noqa: S106 - a token of the vocabulary
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder)  # noqa: S106


def make_model(folder: Path, *, hidden: int, layers: int) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, saved with its tokenizer."""
    torch.manual_seed(0)
    save_tokenizer(folder)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    print(f"Qwen3, {model.num_parameters():,} parameters", flush=True)
    return model


if __name__ == "__main__":
    main()
