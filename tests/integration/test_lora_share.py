"""Adapters beside a base in bfloat16: small updates reach the engine `hf`; what it refuses; what it loads."""

import copy
import random
from pathlib import Path

import pytest
import torch

from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.models.load import load_structure, load_tokenizer
from support.lora_share import Bf16Trainer, bf16_job, case_folder, share
from support.vllm_models import CHARS
from support.weight_updates import Follower

PROMPT = (1,)
SEQUENCES, TOKENS = 8, 100


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_folder(tmp_path_factory.mktemp("lora") / "model")


def _sequences() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(len(CHARS)) for _ in range(TOKENS)] for _ in range(SEQUENCES)]


def _of_trainer(trainer: Bf16Trainer) -> torch.Tensor:
    return torch.tensor([trainer.logprobs(PROMPT, tokens) for tokens in _sequences()])


@torch.no_grad()
def _of_generator(model: torch.nn.Module) -> torch.Tensor:
    """Of the function that the engine computes now, in float32: a copy of its model, its weights cast up."""
    exact = copy.deepcopy(model).float()
    inputs = torch.tensor([[*PROMPT, *tokens] for tokens in _sequences()])
    logprobs = exact(inputs).logits[:, :-1].log_softmax(-1)
    return logprobs.gather(-1, inputs[:, 1:, None])[..., 0]


@pytest.mark.parametrize("steps", [1, 20])
async def test_small_updates_reach_the_engine_hf(folder: Path, tmp_path: Path, steps: int) -> None:
    """At a learning rate of 1e-6 the generator's log-probs move as the trainer's: the share (`lora_share.py`) is 99 % at least.

    The engine's own passes are bfloat16, which rounds log-probs by more than these steps change. So both sides are computed in
    float32 here, the generator's by a copy of the model that the engine holds.
    """
    job = bf16_job(1e-6, engine={"hf": {"slots": 8}})
    trainer = Bf16Trainer(job, folder=folder, checkpoints=tmp_path)
    model = load_structure(str(folder), dtype=torch.bfloat16)
    engine = HfEngine(model=model, tokenizer=load_tokenizer(str(folder)), slots=8)
    follower = Follower(engine, job, folder=folder)
    async with trainer.serving():
        await follower.follow(trainer.publish(0))
        before = _of_trainer(trainer), _of_generator(model)
        torch.testing.assert_close(*before, atol=1e-5, rtol=0)
        for step in range(steps):
            trainer.train(step)
        await follower.follow(trainer.publish(steps))
        after = _of_trainer(trainer), _of_generator(model)
    changes = [(new - old).flatten().tolist() for new, old in zip(after, before, strict=True)]
    print("SHARE", share(*changes), torch.tensor(changes[0]).std(), torch.tensor(changes[0]).abs().max())
    assert 0.99 <= share(*changes) <= 1.01
