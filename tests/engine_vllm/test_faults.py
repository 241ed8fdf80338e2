"""What the engine `vllm` makes of errors in vLLM's own calls, with a stand-in for `AsyncLLM`."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Engine, EngineFailedError, EngineOptions
from streamrl_workers.generator.engines.vllm.options import set_environment
from streamrl_workers.generator.engines.vllm.plugin import file_identity
from streamrl_workers.weights.shared_memory import shared, shared_part
from support.engine_requests import request
from support.vllm_models import END, make, published, save

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end

WEIGHTS = published(make("qwen3", seed=1))


class StandIn:
    """Answers everything at once but requests, which fail when an update has begun; the call `broken` raises."""

    errored = False
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=64, enable_prefix_caching=True))
    engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
    output_processor = SimpleNamespace(request_states={})

    def __init__(self) -> None:
        self.broken, self.updates = "", asyncio.Event()
        self.collectors: list[Any] = []
        self.stepped: Any = None
        self.update: Any = None  # that was asked for last
        self.gives: Any = None  # for a request; else that is an error
        self.chunks = 0  # that vLLM's handler still goes through when a pause was answered

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        yield self.gives

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> Any:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        collector = RequestOutputCollector(RequestOutputKind.DELTA, request_id)
        self.collectors.append(collector)
        if self.updates.is_set():
            asyncio.get_running_loop().call_soon(self.step)
        return collector

    def step(self) -> None:
        for gives in self.gives if isinstance(self.gives, list) else [self.gives]:
            for collector in self.collectors:
                collector.put(ValueError("no room") if gives is None else gives)
            self.stepped.record(None, None)
        self.collectors.clear()

    async def handle(self) -> None:
        for _ in range(self.chunks):
            sum(range(100_000))  # its work on one
            await asyncio.sleep(0)
        self.step()

    def shutdown(self, **_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, None]]:
        async def call(*given: Any, **__: Any) -> None:
            if name == "update_weights":
                self.update = given[0].update_info
            if name == "pause_generation" and self.chunks:
                self.handler = asyncio.create_task(self.handle())
            if name == "update_weights":
                self.updates.set()
                self.step()  # the requests go on meanwhile
            if name == self.broken:
                raise ValueError("not now")

        return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    set_environment(threads=1)

    def create(*_: Any, stat_loggers: list[Any]) -> StandIn:
        made.stepped = stat_loggers[0](None, 0)
        return made

    monkeypatch.setattr("vllm.v1.engine.async_llm.AsyncLLM.from_engine_args", create)
    return made


@pytest.fixture
def failures() -> list[str]:
    return []


@pytest.fixture
def engine(stand_in: StandIn, failures: list[str], tmp_path: Path) -> Iterator[Engine]:
    folder = save("qwen3", tmp_path)
    options = EngineOptions(spec=VllmEngineSpec(), model_path=str(folder), threads=1, failed=failures.append)
    made = engine_kind("vllm").create(options)
    yield made
    made.close()


def test_a_request_that_fails_during_an_update_ends_under_the_weights_in_the_engine(
    engine: Engine, stand_in: StandIn
) -> None:
    engine.load_weights(version=1, tensors=WEIGHTS)
    stand_in.updates.clear()
    assert engine.add([request(7, "1+1=")]) == []
    deltas = engine.load_weights(version=2, tensors=WEIGHTS)
    assert deltas == []
    (delta,) = engine.step()
    assert (delta.lease, delta.version, delta.error) == (7, 2, "vLLM: no room")


def test_a_request_that_vllm_ends_without_a_token_says_so(engine: Engine, stand_in: StandIn) -> None:
    nothing = SimpleNamespace(token_ids=[], logprobs=None, weight_versions=[])
    stand_in.gives = SimpleNamespace(outputs=[nothing], finished=True)
    engine.load_weights(version=1, tensors=WEIGHTS)
    assert engine.add([request(7, "1+1=")]) == []
    (delta,) = engine.step()
    assert (delta.lease, delta.version, delta.error) == (7, 1, "vLLM ended it early")


def test_what_vllm_hands_out_in_many_chunks_comes_before_the_new_weights(
    engine: Engine, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler lets others run after each chunk, so a pause was answered long before it is through."""
    monkeypatch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "4")
    engine.load_weights(version=1, tensors=WEIGHTS)
    stand_in.updates.clear()
    made = SimpleNamespace(
        token_ids=[5],
        logprobs=SimpleNamespace(logprobs=[-1.0]),
        weight_versions=[SimpleNamespace(version="1", start=0)],
    )
    stand_in.gives, stand_in.chunks = SimpleNamespace(outputs=[made], finished=False), engine.slots // 4
    assert engine.add([request(7, "1+1=")]) == []
    (delta,) = engine.load_weights(version=2, tensors=WEIGHTS)
    assert (delta.lease, delta.version, delta.tokens) == (7, 1, (5,))


def test_tokens_of_several_steps_arrive_in_order_under_the_versions_that_made_them(
    engine: Engine, stand_in: StandIn
) -> None:
    """They leave vLLM's thread together; the last output says where a version began."""
    engine.load_weights(version=1, tensors=WEIGHTS)
    stand_in.output_processor.request_states["7"] = SimpleNamespace(weight_version_starts=[("1", 0)])
    spans = [SimpleNamespace(version="1", start=0)]
    stand_in.gives = [
        SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=[token],
                    logprobs=SimpleNamespace(logprobs=[-float(token)]),
                    weight_versions=spans if token == END else None,
                )
            ],
            finished=token == END,
        )
        for token in (5, 6, END)
    ]
    assert engine.add([request(7, "1+1=")]) == []
    deltas: list[Any] = []
    while engine.active():
        deltas += engine.step()
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, END]
    assert [logprob for delta in deltas for logprob in delta.logprobs] == [-5.0, -6.0, -float(END)]
    assert {delta.version for delta in deltas} == {1}


def test_vllm_is_given_the_memory_that_a_pull_has_filled(engine: Engine, stand_in: StandIn) -> None:
    """No byte is copied on this host. What lies elsewhere, as tensors that adapters were merged into, comes beside it."""
    names = sorted(WEIGHTS)[1:]
    memory, places, end = shared(sum(one.data.nbytes for one in WEIGHTS.values())), {}, 0
    pulled = dict(WEIGHTS)
    for name in names:
        places[name], end = end, end + WEIGHTS[name].data.nbytes
        pulled[name] = WEIGHTS[name]._replace(data=memory[places[name] : end])
        pulled[name].data[:] = WEIGHTS[name].data
    engine.load_weights(version=1, tensors=pulled)
    part = shared_part(memory)
    assert part is not None
    number = stand_in.update["files"].index([part[0].path, *file_identity(Path(part[0].path))])
    assert {name: offset for name, _, _, file, offset in stand_in.update["tensors"] if file == number} == places
    assert len(stand_in.update["tensors"]) == len(WEIGHTS)


@pytest.mark.parametrize(
    "call",
    ["pause_generation", "start_weight_update", "update_weights", "finish_weight_update", "resume_generation"],
)
def test_an_update_that_breaks_ends_the_engine(
    *, call: str, engine: Engine, stand_in: StandIn, failures: list[str]
) -> None:
    """Behind no such error does vLLM stand still, or go on with half of the weights."""
    engine.load_weights(version=1, tensors=WEIGHTS)
    stand_in.broken = call
    with pytest.raises(EngineFailedError, match="broke in the middle: not now"):
        engine.load_weights(version=2, tensors=WEIGHTS)
    assert len(failures) == 1
    with pytest.raises(EngineFailedError):
        engine.step()


def test_the_load_can_be_read_while_the_engine_closes(engine: Engine) -> None:
    """Gauges and heartbeats ask until the process ends."""
    before = engine.kv_load()
    engine.close()
    assert before is not None
    assert engine.kv_load() == before


@pytest.mark.soak
def test_a_file_of_weights_that_was_changed_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By vLLM itself: it hashes nothing while nothing is generated, but knows the file that the generator wrote."""

    def identity_of_before(path: Path) -> list[int]:
        before = file_identity(path)
        os.utime(path)
        return before

    spec = VllmEngineSpec.model_validate({"maxConcurrency": 4, "kvCacheBytes": "64Mi"})
    options = EngineOptions(spec=spec, model_path=str(save("qwen3", tmp_path)), threads=1)
    engine = engine_kind("vllm").create(options)
    try:
        engine.load_weights(version=1, tensors=WEIGHTS)
        monkeypatch.setattr("streamrl_workers.generator.engines.vllm.engine.file_identity", identity_of_before)
        with pytest.raises(
            EngineFailedError, match="the memory of weights is another one than the generator has named, or was changed"
        ):
            engine.load_weights(version=2, tensors=WEIGHTS)
    finally:
        engine.close()
