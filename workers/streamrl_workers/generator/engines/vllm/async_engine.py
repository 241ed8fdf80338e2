"""vLLM's `AsyncLLM` in a thread of its own, behind calls that never wait for ever.

    engine's thread ── submit, cancel, pause, update ──▶ THREAD "vllm": event loop, AsyncLLM ──▶ core, workers (processes)
                    ◀── outputs of all requests, a step at a time ──┘

Owns: the thread, its tasks, the deadlines, how the death of vLLM's processes is seen. Does not own what a token means (`engine.py`).
The thread starts vLLM's processes and lives as long as they do: they end with it (`plugin.py`).

Invariants:
- Each token comes out once, under the version that vLLM says it was made by.
- After `pause` has returned nothing made under the old weights is still to come.
- The first fault ends the engine: every call raises `EngineFailedError` from then on, and `failed` was called once.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vllm import AsyncEngineArgs, SamplingParams, envs
from vllm.config import CacheConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.metrics.loggers import StatLoggerBase

from streamrl.errors import UserError
from streamrl_workers.generator.engines.base import EngineFailedError, KvLoad
from streamrl_workers.generator.engines.vllm.adapters import REQUEST, load_request
from streamrl_workers.generator.engines.vllm.plugin import ENV_FAULT_FILE, refusal_in
from streamrl_workers.generator.engines.vllm.start_errors import start_error
from streamrl_workers.weights.shared_memory import SharedMemory

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 1800.0
"""Compiling kernels and capturing graphs of a large model takes minutes."""
_LOAD_BYTES_PER_S = 100e6
"""An update gets the time of the slowest disk beside that of a probe: the core answers nobody while its workers read and load."""
_CLOSE_TIMEOUT_S = 20.0
_GIVE_INTERVAL_S = 0.05
"""Between two hand-overs of tokens to the engine's thread, where no request ends: each costs three threads a turn, whatever it brings."""
_WATCH_INTERVAL_S = 0.1
"""Between two looks whether vLLM has seen the death of one of its processes."""
_HANDLER_TURNS = 16
"""Turns of the loop in which vLLM's output handler takes what has come: it needs two, and one for each chunk."""


class Output(NamedTuple):
    """What one request gained, under one version."""

    lease: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    version: int = -1  # that made the tokens; of no meaning without any
    ended: bool = False  # vLLM makes no more for it
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as vLLM takes it."""

    lease: int
    tokens: list[int]  # prompt and what there is of the completion
    params: SamplingParams
    priority: int  # lower goes first
    traceparent: str = ""  # "": it is not traced


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """What an update loads."""

    memories: Sequence[SharedMemory]  # in which the tensors lie
    identities: Sequence[list[int]]  # of the memories' files
    tensors: Sequence[
        tuple[str, str, list[int], int, int]
    ]  # name, dtype, shape, memory, offset; none: vLLM has the base
    adapters: Path | None  # folder
    size_bytes: int


class _StepListener(StatLoggerBase):
    """Hears of each step, in vLLM's output handler as soon as all requests have their outputs; remembers how full keys and values were."""

    kv_share = 0.0

    def __init__(self, stepped: Callable[[], None]) -> None:
        self._stepped = stepped

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401 - vLLM calls these structures unstable
        if scheduler_stats is not None:
            self.kv_share = scheduler_stats.kv_cache_usage
        self._stepped()

    def log_engine_initialized(self) -> None:
        pass


class AsyncEngine:
    """All methods but `close` are called from one thread, the engine's."""

    def __init__(
        self,
        args: AsyncEngineArgs,
        *,
        probe_timeout_s: float,
        failed: Callable[[str], None],
        adapted: Sequence[str] = (),
    ) -> None:
        """Start vLLM; returns when it could generate. `failed` is called, from another thread, with the first fault.

        Args:
            args: of AsyncLLM.
            probe_timeout_s: a core that answers no probe for so long is stuck.
            failed: see above.
            adapted: layers that get adapters beside the base.

        Raises:
            UserError: vLLM refuses what the job asks for.
            EngineFailedError: it does not start.
        """
        self._args = args
        self._probe_timeout_s = probe_timeout_s
        self._failed = failed
        self._adapted = adapted
        self._fault: str | None = None
        self._outputs: list[Output] = []
        self._given_s = 0.0
        self._filled = threading.Condition()
        self._requests: dict[int, _Request | None] = {}  # by lease; None: vLLM does not have it yet
        self._tasks: set[asyncio.Task[None]] = set()  # that give it requests, or take them back
        self._updating = False
        self._version = -1
        self._steps = _StepListener(self._collect)
        self._cache: CacheConfig
        self._llm: AsyncLLM
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event
        self._scored = 0  # calls of `score`
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="vllm", daemon=True)
        self._thread.start()
        try:
            started.result(timeout=_START_TIMEOUT_S)
        except TimeoutError:
            raise EngineFailedError(f"vLLM was not ready after {_START_TIMEOUT_S:g} s") from None

    # ---- called from the engine's thread

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Generate for these requests."""
        self._check()
        self._loop.call_soon_threadsafe(self._begin, submissions)

    def cancel(self, leases: Collection[int]) -> None:
        """Forget these requests; what has come of them may still be given."""
        self._check()
        self._loop.call_soon_threadsafe(self._abort, leases)

    def outputs(self, *, timeout_s: float) -> list[Output]:
        """What has come since the last call; waits so long for the first."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._outputs) or self._fault is not None, timeout=timeout_s)
            outputs, self._outputs = self._outputs, []
        self._check()
        return outputs

    def pause(self) -> None:
        """Hold all requests and forget their keys and values."""
        self._wait(self._pause(), self._probe_timeout_s, what="a pause")

    def update(self, weights: WeightUpdate, *, version: int) -> None:
        """Put the weights into the paused engine, and resume."""
        timeout_s = self._probe_timeout_s + weights.size_bytes / _LOAD_BYTES_PER_S
        self._wait(self._update(weights, version=version), timeout_s, what="an update of weights")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs at temperature 1 of each sequence's tokens but the first; none of one that is too long."""
        return self._wait(self._score(sequences), self._probe_timeout_s, what="log-probs of given tokens")

    def close(self) -> None:
        """End vLLM's processes."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_TIMEOUT_S)

    def kv_load(self) -> KvLoad | None:
        """As vLLM said at its last step; from any thread. None: it does not say."""
        capacity = self._cache.kv_cache_size_tokens
        if not capacity:
            return None
        used = round(capacity * self._steps.kv_share)
        shares_prompts = bool(self._cache.enable_prefix_caching)
        return KvLoad(capacity_tokens=capacity, used_tokens=used, shares_prompts=shares_prompts)

    def _check(self) -> None:
        if self._fault is not None:
            raise EngineFailedError(self._fault)

    def _wait(self, call: Coroutine[Any, Any, _T], timeout_s: float, *, what: str) -> _T:
        """Run in the loop; a call to a dead core would wait for ever."""
        self._check()
        return asyncio.run_coroutine_threadsafe(self._guarded(call, timeout_s, what=what), self._loop).result()

    # ---- in the thread "vllm"

    def _run(self, started: "Future[None]") -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="streamrl-vllm-") as folder:
                self._run_told(started, told=Path(folder) / "fault.json")
        except Exception as error:  # noqa: BLE001 - whatever vLLM raises ends the engine, and is told
            if started.done():
                self._fail(f"vLLM: {_line(error)}")
            else:
                started.set_exception(error)

    def _run_told(self, started: "Future[None]", *, told: Path) -> None:
        """`told`: where vLLM's other processes say why they do not start."""
        os.environ[ENV_FAULT_FILE] = str(told)
        try:
            asyncio.run(self._serve(started))
        except Exception as error:
            if started.done():
                raise
            raise start_error(error, told=told, arguments=vars(self._args)) from error

    async def _serve(self, started: "Future[None]") -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._llm = AsyncLLM.from_engine_args(self._args, stat_loggers=[lambda *_: self._steps])
        self._cache = self._llm.vllm_config.cache_config
        try:
            await self._llm.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info={"adapted": list(self._adapted)})
            )
            await self._try_out()
            started.set_result(None)
            await self._watch()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._fault is not None:  # a core that stands still would not hear of its end; its workers end with it
                for child in multiprocessing.active_children():
                    child.kill()
            self._llm.shutdown(timeout=_CLOSE_TIMEOUT_S / 2)
            del self._llm  # its destructor would shut down again, when the interpreter has no modules any more

    async def _try_out(self) -> None:
        """One token: what vLLM cannot compute for a model it finds out with the first request, and ends."""
        params = SamplingParams(max_tokens=1, detokenize=False)
        async for _ in self._llm.generate(tokens_input([0]), params, request_id="first"):
            pass

    async def _watch(self) -> None:
        """Until told to close, or the first fault: look whether the core lives, and now and then whether it answers."""
        probed_s = time.monotonic()
        while not self._closing.is_set() and self._fault is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_INTERVAL_S):
                    await self._closing.wait()
            self._collect(give=True)  # an error ends the output handler, so no step follows
            if self._llm.errored:
                self._fail("a process of vLLM has ended")
            elif not self._updating and time.monotonic() - probed_s > self._probe_timeout_s / 3:
                with contextlib.suppress(EngineFailedError):
                    await self._guarded(self._llm.is_paused(), self._probe_timeout_s, what="a probe")
                probed_s = time.monotonic()

    def _fail(self, fault: str) -> None:
        with self._filled:
            if self._fault is not None:
                return
            self._fault = fault
            self._filled.notify_all()
        _log.error("%s", fault)
        if not self._closing.is_set():
            self._failed(fault)

    async def _guarded(self, call: Coroutine[Any, Any, _T], timeout_s: float, *, what: str) -> _T:
        """Await a call to the core; fail the engine if it raises, the core dies meanwhile, or does not answer in time."""
        task = asyncio.create_task(call, name=f"vLLM: {what}")
        deadline_s = time.monotonic() + timeout_s
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_WATCH_INTERVAL_S)
                if self._llm.errored:
                    self._fail("a process of vLLM has ended")
                elif not task.done() and time.monotonic() > deadline_s:
                    self._fail(f"vLLM's core did not answer {what} for {timeout_s:g} s")
                self._check()
            return task.result()
        except EngineFailedError:
            raise
        except Exception as error:
            if reason := refusal_in(str(error)):
                self._fault = (
                    f"vLLM refuses the weights: {reason}"  # `failed` is not called: it would start the process again
                )
                raise UserError(
                    field="engine.vllm",
                    rule=f"cannot run the weights of spec.model: {reason}",
                    fix="take engine hf, or a model that vLLM supports",
                ) from error
            dead = isinstance(error, EngineDeadError)
            self._fail("a process of vLLM has ended" if dead else f"{what} broke in the middle: {_line(error)}")
            raise EngineFailedError(self._fault) from error
        finally:
            task.cancel()

    def _begin(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:  # together, so that vLLM computes their prompts together
            self._requests[submission.lease] = None
            self._own(self._add(submission), name=f"lease {submission.lease}")

    def _abort(self, leases: Collection[int]) -> None:
        requests = [self._requests.pop(lease, None) for lease in leases]
        if known := [request.vllm_id for request in requests if request is not None]:
            self._own(self._llm.abort(known, internal=True), name="vLLM: cancelled requests")

    def _own(self, call: Coroutine[Any, Any, None], *, name: str) -> None:
        task = self._loop.create_task(call, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail("a process of vLLM has ended" if isinstance(error, EngineDeadError) else f"vLLM: {_line(error)}")

    async def _add(self, submission: Submission) -> None:
        """Give a request to vLLM, and take it back if it was cancelled meanwhile."""
        lease = submission.lease
        try:
            collector = await self._llm.add_request(
                str(lease),
                tokens_input(submission.tokens, cache_salt=str(self._version)),
                submission.params,
                priority=submission.priority,
                lora_request=REQUEST if self._adapted else None,
                trace_headers={"traceparent": submission.traceparent} if submission.traceparent else None,
            )
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - of this request alone
            if lease in self._requests:
                self._give([Output(lease, ended=True, error=_line(error))])
            return
        if lease in self._requests:
            self._requests[lease] = _Request(lease, collector, states=self._llm.output_processor.request_states)
        else:
            await self._llm.abort([collector.request_id], internal=True)

    def _collect(self, *, give: bool = False) -> None:
        """Take what each request has gained; give it out if a request ended, the last time is long ago, or `give` is set.

        A task for each request would cost more than all else: the loop wakes it for every token.
        """
        for request in self._requests.values():
            if request is not None:
                try:
                    give |= request.take()
                except EngineDeadError:
                    self._fail("a process of vLLM has ended")
                except Exception as error:  # noqa: BLE001 - of this request alone
                    give = request.fail(_line(error))
        if give or time.monotonic() > self._given_s + _GIVE_INTERVAL_S:
            self._give(
                [output for request in self._requests.values() if request is not None for output in request.gained()]
            )

    def _give(self, outputs: Sequence[Output]) -> None:
        self._given_s = time.monotonic()
        if not outputs:
            return
        for output in outputs:
            if output.ended:
                self._requests.pop(output.lease, None)
        with self._filled:
            self._outputs += outputs
            self._filled.notify_all()

    async def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        most = self._llm.vllm_config.model_config.max_model_len - 1
        self._scored += 1
        names = [f"score-{self._scored}-{number}" for number in range(len(sequences))]
        return await asyncio.gather(
            *(
                self._score_one(list(tokens) if len(tokens) <= most else [], name=name)
                for name, tokens in zip(names, sequences, strict=True)
            )
        )

    async def _score_one(self, tokens: list[int], *, name: str) -> list[float]:
        if not tokens:
            return []
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        async for output in self._llm.generate(
            tokens_input(tokens, cache_salt=name),
            params,
            request_id=name,
            lora_request=REQUEST if self._adapted else None,
        ):
            found = output.prompt_logprobs
        assert found is not None, "vLLM gave no log-probs of the prompt"
        return [place[token].logprob for token, place in zip(tokens[1:], found[1:], strict=True) if place is not None]

    async def _pause(self) -> None:
        self._updating = True
        await self._llm.pause_generation(mode="keep", clear_cache=True)
        # What the core had sent before it answered is in this queue, or with the handler that was woken for it.
        while not self._llm.engine_core.outputs_queue.empty():  # noqa: ASYNC110 - vLLM's queue has no event for it
            await asyncio.sleep(0)
        chunks = self._args.max_num_seqs // envs.VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        for _ in range(_HANDLER_TURNS + chunks):
            await asyncio.sleep(0)
        self._collect(give=True)

    async def _update(self, weights: WeightUpdate, *, version: int) -> None:
        try:
            await self._llm.start_weight_update()
            if weights.tensors:
                info = {
                    "files": [
                        [memory.path, *one] for memory, one in zip(weights.memories, weights.identities, strict=True)
                    ],
                    "tensors": list(weights.tensors),
                }
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await self._llm.finish_weight_update(weight_version=str(version))  # vLLM drops its adapters with it
            if weights.adapters is not None:
                await self._llm.add_lora(load_request(weights.adapters))
            await self._llm.resume_generation()
        finally:
            self._updating = False
        self._version = version


class _Request:
    """A request in vLLM: what it has gained and not given out, and which weights made which of its tokens.

    vLLM's outputs say so only at the end; before, its bookkeeping of the request does.
    """

    __slots__ = ("_collector", "_ended", "_error", "_first", "_logprobs", "_starts", "_states", "_tokens", "lease")

    def __init__(self, lease: int, collector: RequestOutputCollector, *, states: Mapping[str, RequestState]) -> None:
        """`states`: vLLM's, by its own names of requests."""
        self.lease = lease
        self._collector = collector
        self._states = states
        self._starts: Sequence[tuple[str, int]] | None = None  # a version, and its first token
        self._first = 0  # of the tokens below, in the request
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._ended = False
        self._error: str | None = None

    @property
    def vllm_id(self) -> str:
        """Name that vLLM has given to the request."""
        name: str = self._collector.request_id
        return name

    def take(self) -> bool:
        """Take what has come since the last call; True: vLLM makes no more. Raises what came instead. Once for each token, so cheap."""
        output: Any = self._collector.get_nowait()
        if output is None:
            return False
        completion = output.outputs[0]
        if tokens := completion.token_ids:
            self._tokens += tokens
            self._logprobs += completion.logprobs.logprobs
        if completion.weight_versions is not None:
            self._starts = [(span.version, span.start) for span in completion.weight_versions]
        elif self._starts is None:
            self._starts = self._states[self.vllm_id].weight_version_starts  # vLLM appends to it
        self._ended = output.finished
        return self._ended

    def fail(self, error: str) -> bool:
        """It has ended with an error; returns True."""
        self._ended, self._error = True, error
        return True

    def gained(self) -> list[Output]:
        """Return what was taken since the last call, by version."""
        tokens, logprobs, first = self._tokens, self._logprobs, self._first
        if not tokens:
            return [Output(self.lease, ended=True, error=self._error)] if self._ended else []
        self._tokens, self._logprobs, self._first = [], [], first + len(tokens)
        starts = self._starts
        assert starts, "vLLM does not say which weights made a token"
        if starts[-1][1] <= first:  # as nearly always: all by the newest
            return [Output(self.lease, tokens, logprobs, int(starts[-1][0]), self._ended, self._error)]
        ends = [start for _, start in starts[1:]] + [self._first]
        outputs = []
        for (version, start), end in zip(starts, ends, strict=True):
            if end > first:
                part = slice(max(start, first) - first, end - first)
                outputs.append(Output(self.lease, tokens[part], logprobs[part], int(version)))
        outputs[-1] = outputs[-1]._replace(ended=self._ended, error=self._error)
        return outputs


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
