"""The engine `vllm` follows a trainer of adapters, or one that sends deltas: bytes of a version, log-probs, a late joiner, a restart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.spec import RLJobSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Engine, EngineOptions
from support.trainer_groups import trainer_spec
from support.weight_updates import check_updates, model_folder

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end

FUSED = ["q_proj", "up_proj"]
"""Parts of vLLM's fused layers."""
SENT: dict[str, dict[str, Any]] = {
    "qwen2": {"lora": {"rank": 4}, "learningRate": 1e-2},  # tied
    "qwen3": {"lora": {"rank": 2, "alpha": 3, "targetModules": FUSED}, "learningRate": 1e-2},
    "llama": {"lora": {"rank": 4, "targetModules": ["o_proj", "lm_head"]}, "learningRate": 1e-2},
    "qwen3-deltas": {"weights": {"deltas": True}},
}


@pytest.fixture(scope="module", params=list(SENT))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def spec(kind: str) -> RLJobSpec:
    torch.set_num_threads(1)
    engine = {"vllm": {"maxConcurrency": 8, "kvCacheBytes": "64Mi"}}
    return trainer_spec(engine=engine, **SENT[kind])


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(kind.removesuffix("-deltas"), tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def engine(spec: RLJobSpec, folder: Path) -> Iterator[Engine]:
    options = EngineOptions(spec=spec.generators[0].engine.value, model_path=str(folder), threads=1)
    made = engine_kind("vllm").create(options)
    yield made
    made.close()


async def test_adapters_or_deltas_alone_update_the_engine(
    engine: Engine, spec: RLJobSpec, folder: Path, tmp_path: Path
) -> None:
    await check_updates(engine, spec, folder=folder, checkpoints=tmp_path)
