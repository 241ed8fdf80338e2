"""vLLM's first load is proved by the trainer's log-probs; a model whose rotary factors switch runs on one side of the switch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import VllmEngineSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Engine, EngineOptions
from streamrl_workers.models.probe import Prover, take_probe
from streamrl_workers.trainer.engines.torch_engine import build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from streamrl_workers.weights.hashing import TensorBytes
from support.model_families import LONGROPE, save_tiny
from support.trainer_groups import trainer_spec

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end
PROVER = Prover(engine="engine vllm")


def _published(folder: Path) -> tuple[dict[str, TensorBytes], pb.Probe]:
    spec = trainer_spec()
    worker = RankWorker(build_models(spec, model_path=str(folder), device=torch.device("cpu")), spec=spec)
    tensors, probe = take_probe(worker.tensors(None) | worker.probe(None))
    assert probe is not None
    return tensors, probe


def _create(folder: Path, *, max_tokens: int = 30) -> Engine:
    spec = VllmEngineSpec.model_validate({"maxConcurrency": 4, "kvCacheBytes": "64Mi"})
    options = EngineOptions(spec=spec, model_path=str(folder), threads=1, max_tokens=max_tokens)
    made: Engine = engine_kind("vllm").create(options)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(LONGROPE, tmp_path_factory.mktemp("phi3"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    made = _create(folder)
    yield made
    made.close()


def test_the_right_weights_are_proved(engine: Engine, folder: Path) -> None:
    tensors, probe = _published(folder)
    engine.load_weights(version=0, tensors=tensors)
    assert set(engine.load_parts) == {"copy", "pause", "load"}
    assert min(engine.load_parts.values()) > 0
    PROVER.prove(engine, probe)


def test_swapped_layers_are_a_fault(engine: Engine, folder: Path) -> None:
    tensors, probe = _published(folder)
    others = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    swapped = {
        next((name.replace(one, other) for one, other in others.items() if one in name), name): tensor
        for name, tensor in tensors.items()
    }
    engine.load_weights(version=1, tensors=swapped)
    with pytest.raises(UserError, match=r"engine vllm on a model of family 'phi3' differs by [0-9.]+ nats"):
        PROVER.prove(engine, probe)


def test_completions_across_the_switch_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"maxTokens: must be below 32 with engine vllm.*longrope.*got 32"):
        _create(folder, max_tokens=32)
