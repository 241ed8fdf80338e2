"""Processor time that the generator's own Python takes for a token, around an `AsyncLLM` that costs nothing.

    .venv-vllm/bin/python benchmarks/generator_cost.py [--steps 300] [--concurrency 128] [--step-ms 10] [--rounds 3]

`AsyncLLM` is replaced by one that gives each request a token every few milliseconds, all of them at once, as vLLM's output handler does. Alone:
one loop takes the outputs and drops them. Tasks: a task a request does, as with `AsyncLLM.generate`. Ours: the engine `vllm`, engine loop and
outbox around it, drained into messages as the link would. All are processor time of the whole process, so another program on the machine
changes little; the figure is the difference of the last and the first.
"""

import argparse
import asyncio
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm_engine import Generator, make_model, sample

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.requests import Requests
from streamrl_workers.generator.engines.vllm import async_engine
from streamrl_workers.generator.engines.vllm.engine import VllmEngine
from streamrl_workers.models.published import Parameters


class FreeLlm:
    """Stand-in for `AsyncLLM`, as far as `AsyncEngine` calls it. Every request gets a token at each step, until it has as many as it asks for."""

    errored = False

    def __init__(self, step_s: float, stat_loggers: Sequence[Callable[..., Any]] = ()) -> None:
        self._step_s = step_s
        self._left: dict[str, tuple[RequestOutputCollector, int]] = {}
        self._version = "0"
        self.loggers = [make(None, 0) for make in stat_loggers]
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=0))
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue[None]())
        self.output_processor = SimpleNamespace(request_states={})
        self._stepping = asyncio.create_task(self._steps())

    async def add_request(self, request_id: str, prompt: object, params: Any, **_: object) -> RequestOutputCollector:  # noqa: ANN401
        """Give it tokens from the next step on."""
        collector = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
        self.output_processor.request_states[request_id] = SimpleNamespace(weight_version_starts=[(self._version, 0)])
        self._left[request_id] = collector, params.max_tokens
        return collector

    async def generate(self, prompt: object, params: Any, request_id: str, **_: object) -> AsyncIterator[Any]:  # noqa: ANN401
        """Yield an output for each token."""
        collector, finished = await self.add_request(request_id, prompt, params), False
        while not finished:
            output: Any = collector.get_nowait() or await collector.get()
            finished = output.finished
            yield output

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            left, self._left = self._left, {}
            for name, (collector, count) in left.items():
                spans = None if count > 1 else [SimpleNamespace(start=0, version=self._version)]
                flat = SimpleNamespace(logprobs=[-0.5])
                completion: Any = SimpleNamespace(token_ids=[count % 10], logprobs=flat, weight_versions=spans)
                collector.put(SimpleNamespace(outputs=[completion], finished=count == 1))  # type: ignore[arg-type]
                if count > 1:
                    self._left[name] = collector, count - 1
                else:
                    del self.output_processor.request_states[name]
            for logger in self.loggers:
                logger.record(None, None)

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
    async_engine.AsyncLLM = SimpleNamespace(
        from_engine_args=lambda _, *, stat_loggers: FreeLlm(args.step_ms / 1e3, stat_loggers)
    )  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), hidden=64, layers=1)
        tokenizer = AutoTokenizer.from_pretrained(scratch)
    core = async_engine.AsyncEngine(SimpleNamespace(max_num_seqs=args.concurrency), probe_timeout_s=60.0, failed=print)  # type: ignore[arg-type]
    requests = Requests(
        tokenizer=tokenizer, end_ids=frozenset(), limit_tokens=2**20, vocabulary=256, add_special_tokens=True
    )
    engine = VllmEngine(core, slots=args.concurrency, requests=requests, checked=Parameters(model), labels={})
    try:
        asyncio.run(measure(engine, Parameters(model).snapshot(), args))
    finally:
        engine.close()


async def measure(engine: VllmEngine, weights: Any, args: argparse.Namespace) -> None:  # noqa: ANN401
    """Measure all sides in turn."""
    generator = Generator(engine, weights)
    await generator.start()
    gc.collect()
    gc.freeze()  # a collection of all that was imported, in the midst of one side, would be its cost
    leases = itertools.count()
    sides: dict[str, Callable[[list[pb.SampleRequest]], Awaitable[object]]] = {
        "alone": partial(in_vllms_thread, engine, alone),
        "tasks": partial(in_vllms_thread, engine, with_tasks),
        "ours": generator.serve,
    }
    found: dict[str, list[float]] = {name: [] for name in sides}
    for place in range(args.rounds + 1):
        for name, serve in sides.items():
            work = [sample(next(leases), max_tokens=args.steps) for _ in range(args.concurrency)]
            begun_s = time.process_time()
            await serve(work)
            if place:  # the first warms all up
                found[name].append(1e6 * (time.process_time() - begun_s) / (args.steps * args.concurrency))
    ours = [both - bare for both, bare in zip(found["ours"], found["alone"], strict=True)]
    print("| | µs a token | range |", "|---|---|---|", sep="\n")
    for name, times in (*found.items(), ("the generator's own", ours)):
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f}–{max(times):.1f} |")


async def in_vllms_thread(
    engine: VllmEngine,
    take: Callable[[Any, list[pb.SampleRequest]], Coroutine[Any, Any, None]],
    work: list[pb.SampleRequest],
) -> None:
    """Take the outputs of these requests there."""
    core = engine._core
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(take(core._llm, work), core._loop))


async def alone(llm: FreeLlm, work: list[pb.SampleRequest]) -> None:
    """Take all outputs by one loop, after each step."""
    open_ = [
        await llm.add_request(f"alone-{one.lease}", None, SimpleNamespace(max_tokens=one.sampling.max_tokens))
        for one in work
    ]
    stepped = asyncio.Event()
    listener = SimpleNamespace(record=lambda *_: stepped.set())
    llm.loggers.append(listener)
    while open_:
        await stepped.wait()
        stepped.clear()
        open_ = [collector for collector in open_ if (output := collector.get_nowait()) is None or not output.finished]
    llm.loggers.remove(listener)


async def with_tasks(llm: FreeLlm, work: list[pb.SampleRequest]) -> None:
    """Take all outputs with a task a request."""

    async def one(request: pb.SampleRequest) -> None:
        params = SimpleNamespace(max_tokens=request.sampling.max_tokens)
        async for _ in llm.generate(None, params, f"tasks-{request.lease}"):
            pass

    await asyncio.gather(*map(one, work))


if __name__ == "__main__":
    main()
