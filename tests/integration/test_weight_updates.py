"""The engine `hf` follows a trainer of adapters or of a side path, or one that sends deltas: bytes of a version, log-probs, a late joiner, a restart, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import EngineOptions
from streamrl_workers.models.published import LORA_B
from streamrl_workers.weights.address import Route, WeightsError
from support.trainer_groups import trainer_spec
from support.weight_updates import Follower, PublishingTrainer, check_updates, model_folder

ALL_LINEAR: dict[str, Any] = {"rank": 4}
HEAD_TOO: dict[str, Any] = {"rank": 2, "alpha": 3, "targetModules": ["q_proj", "down_proj", "lm_head"]}

SIDE_PATH: dict[str, Any] = {"lateLayers": 1, "width": 8}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {"lora": ALL_LINEAR, "learningRate": 1e-2}),
        ("llama", {"lora": HEAD_TOO, "learningRate": 1e-2}),
        ("qwen2", {"sherl": SIDE_PATH, "learningRate": 1e-2}),
        ("qwen2", {"weights": {"deltas": True}}),
    ],
    ids=["tied", "head", "side-path", "deltas"],
)
async def test_adapters_or_deltas_alone_update_the_engine(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = model_folder(kind, tmp_path / "model")
    spec = trainer_spec(engine={"hf": {"slots": 8}}, **options)
    engine = create_hf(
        EngineOptions(spec=spec.generators[0].engine.value, model_path=str(folder), threads=1, sherl=spec.trainer.sherl)
    )
    await check_updates(engine, spec, folder=folder, checkpoints=tmp_path)


async def test_a_version_that_cannot_be_merged_leaves_the_old_one(tmp_path: Path) -> None:
    folder = model_folder("qwen2", tmp_path / "model")
    spec = trainer_spec(lora=ALL_LINEAR, engine={"hf": {"slots": 8}})
    engine = create_hf(EngineOptions(spec=spec.generators[0].engine.value, model_path=str(folder), threads=1))
    trainer = PublishingTrainer(spec, folder=folder, checkpoints=tmp_path)
    follower = Follower(engine, spec, folder=folder)
    async with trainer.serving():
        before = await follower.follow(trainer.publish(0))
        half = {name: tensor for name, tensor in trainer.engine.tensors().items() if not name.endswith(LORA_B)}
        version = trainer.store.publish(attempt=1, step=1, tensors=half)
        target = trainer.publish(0)
        target.version.CopyFrom(version)
        with pytest.raises(WeightsError, match=r"weights cannot be used: tensor .*:lora_B of an adapter is missing"):
            await follower.pull(Route(target))
        assert engine.version == 0
        trainer.train(0)
        after = await follower.follow(trainer.publish(1))
        follower.check(trainer, versions=(0, 1))
    assert before != after
