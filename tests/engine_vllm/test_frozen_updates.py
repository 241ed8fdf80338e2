"""vLLM's core or worker stands still (SIGSTOP) at each call of an update: it goes on with the right weights, or the engine ends in time."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Engine, EngineFailedError, EngineOptions
from support.runs import wait_for
from support.vllm_models import logprobs, make, published, save

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    ),  # vLLM leaves sockets open at its end
]
CALLS = ("pause_generation", "start_weight_update", "update_weights", "finish_weight_update", "resume_generation")
PROCESSES = ("EngineCore", "Worker")
CLOSE = 1e-4


def started(folder: Path, *, failures: list[str], bound_s: float) -> Engine:
    spec = VllmEngineSpec.model_validate({"maxConcurrency": 8, "kvCacheBytes": "64Mi"})
    options = EngineOptions(
        spec=spec, model_path=str(folder), threads=1, failed=failures.append, probe_timeout_s=bound_s
    )
    return engine_kind("vllm").create(options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = started(folder, failures=[], bound_s=120.0)
    yield made
    made.close()


def process_of(name: str) -> psutil.Process:
    """The newest of vLLM's processes with this title below this one."""
    found = [one for one in psutil.Process().children(recursive=True) if f"VLLM::{name}" in title(one)]
    assert found, f"no {name}"
    return max(found, key=lambda one: one.create_time())


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()) if alive(process) else ""


def freeze_at(call: str, process: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """SIGSTOP the process as AsyncLLM is asked for this; set when it has been done."""
    from vllm.v1.engine.async_llm import AsyncLLM  # after the engine has set the environment

    frozen, honest = threading.Event(), getattr(AsyncLLM, call)

    async def frozen_call(llm: Any, *args: Any, **kwargs: Any) -> Any:
        if not frozen.is_set():
            os.kill(process.pid, signal.SIGSTOP)
            frozen.set()
        return await honest(llm, *args, **kwargs)

    monkeypatch.setattr(AsyncLLM, call, frozen_call)
    return frozen


@pytest.mark.parametrize(("number", "case"), list(enumerate(itertools.product(CALLS, PROCESSES), start=1)))
def test_who_comes_back_in_time_generates_under_the_right_weights(
    number: int, case: tuple[str, str], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, process = case[0], process_of(case[1])
    before, after = (make("qwen3", seed=seed) for seed in (2 * number, 2 * number + 1))
    engine.load_weights(version=2 * number, tensors=published(before))
    engine.add([sample(10 * number + place) for place in range(4)])
    tokens: dict[int, list[tuple[int, float, int]]] = {}
    prompts: dict[int, list[int]] = {}
    collect(engine.step(), tokens, prompts)
    frozen = freeze_at(call, process, monkeypatch)
    woken = threading.Thread(target=lambda: (frozen.wait(), time.sleep(1.0), process.resume()), name="waker")
    woken.start()
    collect(engine.load_weights(version=2 * number + 1, tensors=published(after)), tokens, prompts)
    woken.join()
    while engine.active():
        collect(engine.step(), tokens, prompts)
    versions = {version for gained in tokens.values() for _, _, version in gained}
    assert 2 * number + 1 in versions
    for lease, gained in tokens.items():
        ids = [token for token, _, _ in gained]
        for version, model in ((2 * number, before), (2 * number + 1, after)):
            truth = logprobs(model, prompts[lease], ids)
            assert all(
                abs(given - true) < CLOSE for (_, given, by), true in zip(gained, truth, strict=True) if by == version
            )


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("call", ["pause_generation", "update_weights", "resume_generation"])
def test_who_does_not_come_back_ends_the_engine_in_time(
    call: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[str] = []
    others = set(psutil.Process().children(recursive=True))
    engine = started(folder, failures=failures, bound_s=10.0)
    engine.load_weights(version=1, tensors=published(make("qwen3", seed=1)))
    children = [one for one in psutil.Process().children(recursive=True) if one not in others and "VLLM" in title(one)]
    freeze_at(call, process_of(name), monkeypatch)
    begun_s = time.monotonic()
    with pytest.raises(EngineFailedError, match=r"vLLM's core did not answer (a pause|an update of weights) for 10"):
        engine.load_weights(version=2, tensors=published(make("qwen3", seed=2)))
        while True:
            engine.step()  # the core answered before its worker was asked
    assert time.monotonic() - begun_s < 60
    engine.close()
    assert len(failures) == 1
    wait_for(lambda: not any(alive(one) for one in children), what=f"the end of {children}")


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def collect(deltas: Any, tokens: dict[int, list[tuple[int, float, int]]], prompts: dict[int, list[int]]) -> None:
    for delta in deltas:
        assert delta.error is None, delta.error
        prompts.setdefault(delta.lease, delta.prompt_tokens)
        gained = zip(delta.tokens, delta.logprobs, strict=True)
        tokens.setdefault(delta.lease, []).extend((token, given, delta.version) for token, given in gained)


def sample(lease: int) -> pb.SampleRequest:
    sampling = pb.Sampling(temperature=1.0, top_p=1.0, max_tokens=100)
    return pb.SampleRequest(lease=lease, group_id=lease, prompt=f"{lease}+1=", seed=lease, sampling=sampling)
