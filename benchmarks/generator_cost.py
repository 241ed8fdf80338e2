"""Processor time that the generator's own Python takes for a token, around an `AsyncLLM` that costs nothing.

    .venv-vllm/bin/python benchmarks/generator_cost.py [--steps 300] [--concurrency 128] [--step-ms 10] [--rounds 3]

`AsyncLLM` is replaced by one that gives each request a token every few milliseconds, all of them at once, as vLLM's output handler does. Alone:
a task a request takes the outputs. Ours: the engine `vllm`, engine loop and outbox around it, drained into messages as the link would. Both are
processor time of the whole process, so another program on the machine changes little; the figure is their difference.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm_engine import Generator, make_model, sample

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.requests import Requests
from streamrl_workers.generator.engines.vllm import async_engine
from streamrl_workers.generator.engines.vllm.engine import VllmEngine
from streamrl_workers.models.published import Parameters


class FreeLlm:
    """Stand-in for `AsyncLLM`, as far as `AsyncEngine` calls it. Every request gets a token at each step, until it has as many as it asks for."""

    errored = False

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._waiting: dict[str, asyncio.Queue[None]] = {}
        self._version = "0"
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=0))
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue[None]())
        self.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
        self._stepping = asyncio.create_task(self._steps())

    async def generate(self, prompt: object, params: Any, request_id: str, **_: object) -> AsyncIterator[Any]:  # noqa: ANN401
        """Yield an output for each token."""
        state = SimpleNamespace(weight_version_starts=[(self._version, 0)])
        self.output_processor.external_req_ids[request_id] = [request_id]
        self.output_processor.request_states[request_id] = state
        queue = self._waiting[request_id] = asyncio.Queue()
        try:
            for number in range(1, params.max_tokens + 1):
                await queue.get()
                finished = number == params.max_tokens
                spans = [SimpleNamespace(start=0, end=number, version=self._version)] if finished else None
                flat = SimpleNamespace(logprobs=[-0.5])
                completion = SimpleNamespace(token_ids=[number % 10], logprobs=flat, weight_versions=spans)
                yield SimpleNamespace(outputs=[completion], finished=finished)
        finally:
            del self._waiting[request_id]
            del self.output_processor.external_req_ids[request_id], self.output_processor.request_states[request_id]

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            for queue in self._waiting.values():
                queue.put_nowait(None)

    async def init_weight_transfer_engine(self, _: object) -> None:
        """Do nothing."""

    async def is_paused(self) -> bool:
        """Return whether it is paused."""
        return False

    async def pause_generation(self, **_: object) -> None:
        """Do nothing: no output is on its way between two steps."""

    async def start_weight_update(self) -> None:
        """Do nothing."""

    async def update_weights(self, _: object) -> None:
        """Do nothing."""

    async def finish_weight_update(self, *, weight_version: str) -> None:
        """Give what is made from now on another version."""
        self._version = weight_version

    async def resume_generation(self) -> None:
        """Do nothing."""

    def shutdown(self, **_: object) -> None:
        """End it."""
        self._stepping.cancel()


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 300), ("concurrency", 128), ("step-ms", 10), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    async_engine.AsyncLLM = SimpleNamespace(from_engine_args=lambda *_, **__: FreeLlm(args.step_ms / 1e3))  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), hidden=64, layers=1)
        tokenizer = AutoTokenizer.from_pretrained(scratch)
    core = async_engine.AsyncEngine(SimpleNamespace(), probe_timeout_s=60.0, failed=print)  # type: ignore[arg-type]
    requests = Requests(
        tokenizer=tokenizer, end_ids=frozenset(), limit_tokens=2**20, vocabulary=256, add_special_tokens=True
    )
    engine = VllmEngine(core, slots=args.concurrency, requests=requests, checked=Parameters(model), labels={})
    try:
        asyncio.run(measure(engine, Parameters(model).snapshot(), args))
    finally:
        engine.close()


async def measure(engine: VllmEngine, weights: Any, args: argparse.Namespace) -> None:  # noqa: ANN401
    """Measure both sides in turn."""
    generator = Generator(engine, weights)
    await generator.start()
    leases = itertools.count()
    found: dict[str, list[float]] = {"alone": [], "ours": []}
    for place in range(args.rounds + 1):
        for name in ("alone", "ours"):
            work = [sample(next(leases), max_tokens=args.steps) for _ in range(args.concurrency)]
            begun_s = time.process_time()
            await (alone(engine, work) if name == "alone" else generator.serve(work))
            if place:  # the first warms both up
                found[name].append(1e6 * (time.process_time() - begun_s) / (args.steps * args.concurrency))
    ours = [both - bare for both, bare in zip(found["ours"], found["alone"], strict=True)]
    print("| | µs a token | range |", "|---|---|---|", sep="\n")
    for name, times in (*found.items(), ("the generator's own", ours)):
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f}–{max(times):.1f} |")


async def alone(engine: VllmEngine, work: list[pb.SampleRequest]) -> None:
    """Take all outputs in vLLM's thread, with a task a request."""

    async def one(request: pb.SampleRequest) -> None:
        params = SimpleNamespace(max_tokens=request.sampling.max_tokens)
        async for _ in engine._core._llm.generate(None, params, f"alone-{request.lease}"):
            pass

    async def together() -> None:
        await asyncio.gather(*map(one, work))

    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(together(), engine._core._loop))


if __name__ == "__main__":
    main()
