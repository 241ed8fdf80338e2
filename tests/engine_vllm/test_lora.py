"""Adapters beside a base in bfloat16 in the engine `vllm`: each version's tokens are right under it, running samples go on under the next; refusals at the start."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamrl.errors import UserError
from streamrl.spec import RLJobSpec
from streamrl_workers.generator.engines import engine_kind
from streamrl_workers.generator.engines.base import Engine, EngineOptions
from support.lora_share import Bf16Trainer, bf16_job, case_folder, share
from support.weight_updates import Follower

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # vLLM leaves sockets open at its end

ENGINE = {"vllm": {"maxConcurrency": 8, "kvCacheBytes": "64Mi"}}
LORA = {"rank": 4, "alpha": 6, "targetModules": ["q_proj", "v_proj", "up_proj", "o_proj"]}
"""Two parts of a fused layer, one of another, and one that stands alone."""
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "initializer_range": 0.08}  # fmt: skip
UPDATES = 3


@pytest.fixture(scope="module")
def job() -> RLJobSpec:
    torch.set_num_threads(1)
    return bf16_job(1e-2, engine=ENGINE, lora=LORA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_folder(tmp_path_factory.mktemp("lora") / "model", **SIZES)


def _options(job: RLJobSpec, folder: Path, **changes: Any) -> EngineOptions:
    lora = job.trainer.unmerged_lora
    assert lora is not None
    return EngineOptions(
        spec=job.generators[0].engine.value,
        model_path=str(folder),
        threads=1,
        precision="BF16",
        lora=lora.model_copy(update=changes),
    )


@pytest.fixture(scope="module")
def engine(job: RLJobSpec, folder: Path) -> Iterator[Engine]:
    made = engine_kind("vllm").create(_options(job, folder))
    yield made
    made.close()


async def test_adapters_are_replaced_under_running_samples(
    engine: Engine, job: RLJobSpec, folder: Path, tmp_path: Path
) -> None:
    """Of the tokens made under a version, log-probs moved from the version before as the trainer's did: old adapters would give 0."""
    trainer, follower = Bf16Trainer(job, folder=folder, checkpoints=tmp_path), Follower(engine, job, folder=folder)
    async with trainer.serving():
        await follower.follow(trainer.publish(0))
        for version in range(UPDATES):
            trainer.train(version)
            await follower.follow(trainer.publish(version + 1), tokens=400)
    for version in range(1, UPDATES + 1):
        own, given = map(torch.tensor, follower.changes(trainer, version=version, since=version - 1))
        assert share(own, given) == pytest.approx(1.0, abs=0.05)
    assert follower.crossed()


def test_what_vllm_cannot_adapt_is_refused_by_name(job: RLJobSpec, folder: Path) -> None:
    """vLLM 0.32 loads no adapter of a head, except for a few models."""
    with pytest.raises(UserError) as refused:
        engine_kind("vllm").create(_options(job, folder, target_modules=("q_proj", "lm_head")))
    (line,) = refused.value.lines
    assert "spec.trainer.lora: it cannot adapt lm_head" in line


def test_a_rank_that_vllm_does_not_have_is_refused(job: RLJobSpec, folder: Path) -> None:
    with pytest.raises(UserError, match=r"^spec.trainer.lora.rank: must be at most 512 with engine vllm"):
        engine_kind("vllm").create(_options(job, folder, rank=513))
