"""vLLM's `AsyncLLM` in a thread of its own, behind calls that never wait for ever.

    engine's thread ── submit, cancel, pause, update ──▶ THREAD "vllm": event loop, AsyncLLM, one task a request ──▶ core, workers (processes)
                    ◀──────────── outputs ─────────────┘

Owns: the thread, the tasks, the deadlines, how the death of vLLM's processes is seen. Does not own what a token means (`engine.py`).
The thread starts vLLM's processes and lives as long as they do: they end with it (`plugin.py`).

Invariants:
- Each token comes out once, under the version that vLLM says it was made by.
- After `pause` has returned nothing made under the old weights is still to come.
- The first fault ends the engine: every call raises `EngineFailedError` from then on, and `failed` was called once.
"""

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
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
from vllm.v1.metrics.loggers import StatLoggerBase

from streamrl.errors import UserError
from streamrl_workers.generator.engines.base import EngineFailedError, KvLoad
from streamrl_workers.generator.engines.vllm.adapters import REQUEST, load_request
from streamrl_workers.generator.engines.vllm.plugin import ENV_FAULT_FILE, refusal_in
from streamrl_workers.generator.engines.vllm.start_errors import start_error

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 1800.0
"""Compiling kernels and capturing graphs of a large model takes minutes."""
_LOAD_BYTES_PER_S = 100e6
"""An update gets the time of the slowest disk beside that of a probe: the core answers nobody while its workers read and load."""
_CLOSE_TIMEOUT_S = 20.0
_WATCH_INTERVAL_S = 0.1
"""Between two looks whether vLLM has seen the death of one of its processes."""
_HANDLER_TURNS = 16
"""Turns of the loop in which vLLM's output handler, and then the requests' tasks, take what has come: they need four, and one for each chunk."""


class Output(NamedTuple):
    """What one request gained, under one version. One for each token, so cheap."""

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
class WeightFiles:
    """What an update loads."""

    base: Path | None  # with all tensors but adapters; None: vLLM has them
    identity: Sequence[int] = ()  # of the base's file when it had been written
    adapters: Path | None = None  # folder
    size_bytes: int = 0


class _KvUsage(StatLoggerBase):
    """Remembers how full the memory for keys and values was at the last step."""

    share = 0.0

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ANN401 - vLLM calls these structures unstable
        pass

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
        if scheduler_stats is not None:
            self.share = scheduler_stats.kv_cache_usage

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
        self._gained: list[Output] = []  # in this turn of the loop
        self._outputs: list[Output] = []
        self._filled = threading.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._updating = False
        self._version = -1
        self._usage = _KvUsage(None)
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

    def update(self, files: WeightFiles, *, version: int) -> None:
        """Put the weights into the paused engine, if the base's file is still as it was written, and go on."""
        timeout_s = self._probe_timeout_s + files.size_bytes / _LOAD_BYTES_PER_S
        self._wait(self._update(files, version=version), timeout_s, what="an update of weights")

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
        used = round(capacity * self._usage.share)
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
        self._llm = AsyncLLM.from_engine_args(self._args, stat_loggers=[lambda *_: self._usage])
        self._cache = self._llm.vllm_config.cache_config
        try:
            await self._llm.init_weight_transfer_engine(
                WeightTransferInitRequest(init_info={"adapted": list(self._adapted)})
            )
            await self._try_out()
            started.set_result(None)
            await self._watch()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
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
        for submission in submissions:
            lease = submission.lease
            task = self._loop.create_task(self._generate(submission), name=f"lease {lease}")
            self._tasks[lease] = task
            task.add_done_callback(functools.partial(self._ended, lease))

    def _ended(self, lease: int, _: "asyncio.Task[None]") -> None:
        del self._tasks[lease]

    def _abort(self, leases: Collection[int]) -> None:
        for lease in leases:
            task = self._tasks.get(lease)
            if task is not None:
                task.cancel()

    async def _generate(self, submission: Submission) -> None:
        """One request, from its start to its end."""
        lease, done = submission.lease, 0
        versions = _Versions(self._llm, request_id=str(lease))
        try:
            async for output in self._llm.generate(
                tokens_input(submission.tokens, cache_salt=str(self._version)),
                submission.params,
                request_id=str(lease),
                priority=submission.priority,
                lora_request=REQUEST if self._adapted else None,
                trace_headers={"traceparent": submission.traceparent} if submission.traceparent else None,
            ):
                completion = output.outputs[0]
                tokens, count = completion.token_ids, len(completion.token_ids)
                logprobs = completion.logprobs.logprobs[-count:] if count else []
                *earlier, (start, _, version) = versions.of(completion, first=done)
                for begin, end, old in earlier:
                    self._put(
                        Output(lease, tokens[begin - done : end - done], logprobs[begin - done : end - done], old)
                    )
                if earlier:
                    tokens, logprobs = tokens[start - done :], logprobs[start - done :]
                self._put(Output(lease, tokens, logprobs, version, output.finished))
                done += count
        except EngineDeadError:
            self._fail("a process of vLLM has ended")
        except Exception as error:  # noqa: BLE001 - of this request alone
            self._put(Output(lease=lease, ended=True, error=_line(error)))

    def _put(self, output: Output) -> None:
        """Give it out with all others of this turn: those that vLLM's handler has woken for one step run in one turn."""
        if not self._gained:
            self._loop.call_soon(self._give)
        self._gained.append(output)

    def _give(self) -> None:
        with self._filled:
            self._outputs += self._gained
            self._filled.notify_all()
        self._gained = []

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

    async def _update(self, files: WeightFiles, *, version: int) -> None:
        try:
            await self._llm.start_weight_update()
            if files.base is not None:
                info = {"path": str(files.base), "identity": list(files.identity)}
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await self._llm.finish_weight_update(weight_version=str(version))  # vLLM drops its adapters with it
            if files.adapters is not None:
                await self._llm.add_lora(load_request(files.adapters))
            await self._llm.resume_generation()
        finally:
            self._updating = False
        self._version = version


class _Versions:
    """Which weights made which tokens of a request, as vLLM says.

    Its outputs say so only at the end; before, its bookkeeping of the request does.
    """

    def __init__(self, llm: AsyncLLM, *, request_id: str) -> None:
        self._processor = llm.output_processor
        self._request_id = request_id
        self._starts: list[tuple[str, int]] | None = None
        self._newest = ("", -1)  # as vLLM names it, and its number

    def of(self, completion: Any, *, first: int) -> list[tuple[int, int, int]]:  # noqa: ANN401 - vLLM's CompletionOutput
        """(start, end, version) over the tokens `first` … of this output; one empty span where there are none."""
        end = first + len(completion.token_ids)
        if completion.weight_versions is not None:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        else:
            starts = self._live_starts()
        if starts and starts[-1][1] <= first:  # as nearly always: all by the newest
            return [(first, end, self._number(starts[-1][0]))]
        if first == end:  # it ends before its first token
            return [(first, end, -1)]
        ends = [start for _, start in starts[1:]] + [end]
        spans = [(start, stop, int(version)) for (version, start), stop in zip(starts, ends, strict=True)]
        return [(max(start, first), stop, version) for start, stop, version in spans if stop > first]

    def _number(self, version: str) -> int:
        if version != self._newest[0]:
            self._newest = (version, int(version))
        return self._newest[1]

    def _live_starts(self) -> list[tuple[str, int]]:
        if self._starts is None:
            (internal,) = self._processor.external_req_ids[self._request_id]
            self._starts = self._processor.request_states[internal].weight_version_starts
        return self._starts


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
