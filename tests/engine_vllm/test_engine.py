"""The engine `vllm` on small models, against transformers' own forward."""

import multiprocessing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Delta, Engine, EngineOptions
from support.metric_pages import families
from support.vllm_models import logprobs, make, published, save
from support.vllm_process import end

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end

LABELS = {"namespace": "local", "rljob": "sums", "pool": "large"}
SHARE = "vllm:kv_cache_usage_perc"
LOAD = 32
UPDATES = 20
CLOSE = 1e-4
DEADLINE_S = 300.0
BYTES_PER_TOKEN = 2 * 2 * 32 * 4
"""Keys and values of two layers, one head of 32 float32 each."""


@pytest.fixture(scope="module", params=[pytest.param("qwen2", marks=pytest.mark.soak), "qwen3", "llama"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save(kind, tmp_path_factory.mktemp(kind))
    spec = VllmEngineSpec.model_validate({"maxConcurrency": LOAD, "kvCacheBytes": "64Mi"})
    options = EngineOptions(spec=spec, model_path=str(folder), threads=1, metric_labels=LABELS)
    made = engine_kind("vllm").create(options)
    yield made
    made.close()


def test_twenty_updates_under_load(engine: Engine, kind: str) -> None:
    """Each token's log-prob is that of a plain forward of the version that it names; none is lost or doubled."""
    models = {version: make(kind, seed=version) for version in range(1, UPDATES + 2)}
    assert engine.load_weights(version=1, tensors=published(models[1])) == []
    gained: dict[int, list[Delta]] = defaultdict(list)
    ended: set[int] = set()
    issued = 0
    for version in range(1, UPDATES + 2):
        if version > 1:
            late = engine.load_weights(version=version, tensors=published(models[version]))
            take(late, gained, ended, version=version - 1)
        made = 0
        while made < 10 * LOAD:
            free = engine.free()
            take(engine.add([sample(issued + place) for place in range(free)]), gained, ended, version=version)
            issued += free
            made += take(engine.step(), gained, ended, version=version)
    while engine.active():
        take(engine.step(), gained, ended, version=version)
    assert ended == set(range(issued))
    (tokens,) = (
        line for line in engine.metrics().decode().splitlines() if line.startswith("vllm:generation_tokens_total")
    )
    assert float(tokens.split()[-1]) >= made
    worst, spans = 0.0, 0
    for lease, deltas in gained.items():
        tokens = [token for delta in deltas for token in delta.tokens]
        versions = [delta.version for delta in deltas for _ in delta.tokens]
        given = [logprob for delta in deltas for logprob in delta.logprobs]
        prompt = deltas[0].prompt_tokens
        assert versions == sorted(versions) and len(tokens) <= 100, lease
        spans += len(set(versions)) > 1
        for version in set(versions):
            truth = logprobs(models[version], prompt, tokens)
            worst = max(worst, *(abs(a - b) for a, b, v in zip(given, truth, versions, strict=True) if v == version))
    assert worst < CLOSE
    assert spans > UPDATES


def test_how_full_the_memory_is(engine: Engine, kind: str) -> None:
    """As the scheduler hears it: capacity from vLLM's configuration, load from its last step."""
    engine.load_weights(version=UPDATES + 2, tensors=published(make(kind, seed=1)))
    empty = engine.kv_load()
    assert empty is not None
    assert empty.shares_prompts
    assert empty.capacity_tokens == 64 * 2**20 // BYTES_PER_TOKEN
    assert engine.add([sample(lease) for lease in range(100_000, 100_000 + LOAD)]) == []
    most, shares = 0, set[float]()
    while engine.active():
        engine.step()
        shares.update(
            one.value for one in families(engine.metrics())[SHARE].samples if LABELS.items() <= one.labels.items()
        )
        load = engine.kv_load()
        assert load is not None
        most = max(most, load.used_tokens)
    longest = 32 * -(-(100 + len("12500+25000=")) // 32)  # in vLLM's blocks
    assert LOAD < most <= LOAD * longest
    assert 0 < max(shares) <= 1, f"{SHARE} names the pool"


def take(deltas, gained, ended, *, version: int) -> int:
    for delta in deltas:
        assert delta.version == version, "the outbox names the weights in the engine"
        assert delta.lease not in ended, "a delta behind the last"
        assert delta.error is None, delta.error
        gained[delta.lease].append(delta)
        if delta.finish_reason is not None:
            ended.add(delta.lease)
    return sum(len(delta.tokens) for delta in deltas)


def sample(lease: int) -> pb.SampleRequest:
    return pb.SampleRequest(
        lease=lease,
        group_id=lease // 8,
        prompt=f"{lease // 8}+{lease // 4}=",
        seed=lease,
        sampling=pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=100),
    )


@pytest.mark.soak
def test_a_process_of_vllm_ends_without_a_search_for_garbage(tmp_path: Path) -> None:
    """It would take longer than vLLM waits before it kills the process."""
    process = multiprocessing.get_context("spawn").Process(target=end, args=(tmp_path / "frozen",))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    assert int((tmp_path / "frozen").read_text()) > 0
