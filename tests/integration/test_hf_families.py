"""The engine `hf` on today's model families: log-probs of what it draws are those of plain transformers, or it refuses by name."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from streamrl.errors import UserError
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import Delta, EngineOptions
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.trainer.engines.torch_engine import build_models
from streamrl_workers.trainer.engines.worker import RankWorker
from streamrl_workers.weights.hashing import TensorBytes
from support.engine_requests import request, sampling
from support.model_families import FAMILIES, LONGROPE, save_tiny
from support.prefix_logprobs import prefix_logprobs
from support.trainer_groups import trainer_spec

REFUSED = {
    "gemma2": "its cache has DynamicSlidingWindowLayer",
    "gemma3": "its cache has DynamicSlidingWindowLayer",
    "gpt_oss": "its cache has DynamicSlidingWindowLayer",
}
PROMPTS = ("1+1=", "abcabc" * 3, "0123456789" * 3, "9" * 32, "8-3=" * 15)
"""One is as long as the switch of LongRoPE, one longer; the others grow across it."""
GENERATED = 48


def _published(folder: Path) -> dict[str, TensorBytes]:
    spec = trainer_spec()
    models = build_models(spec, model_path=str(folder), device=torch.device("cpu"))
    return RankWorker(models, spec=spec).tensors(None)


def _engine(folder: Path, **spec: object) -> HfEngine:
    options = EngineOptions(spec=HfSpec.model_validate({"slots": 4, **spec}), model_path=str(folder), threads=1)
    return create_hf(options)


def _gained(engine: HfEngine) -> dict[int, list[Delta]]:
    """Five requests in four slots, so that rows move; the last one comes as another ends."""
    waiting = [
        request(number, prompt, seed=number, limits=sampling(max_tokens=GENERATED - 6 * number))
        for number, prompt in enumerate(PROMPTS)
    ]
    gained: dict[int, list[Delta]] = defaultdict(list)
    while waiting or engine.active():
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        for delta in [*engine.add(admitted), *engine.step()]:
            assert delta.error is None
            gained[delta.lease].append(delta)
    return gained


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_each_prefix(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    if family in REFUSED:
        with pytest.raises(ValueError, match=f"is not supported by engine hf: {REFUSED[family]}"):
            _engine(tmp_path)
        return
    engine = _engine(tmp_path)
    engine.load_weights(version=1, tensors=_published(tmp_path))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    for deltas in _gained(engine).values():
        prompt = next(delta.prompt_tokens for delta in deltas if delta.prompt_tokens)
        tokens = [*prompt, *(token for delta in deltas for token in delta.tokens)]
        found = torch.tensor([logprob for delta in deltas for logprob in delta.logprobs])
        with torch.inference_mode():
            expected = prefix_logprobs(plain, tokens, places=range(len(prompt), len(tokens)))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_longrope_and_invariance_of_batches_are_refused_together(tmp_path: Path) -> None:
    save_tiny(LONGROPE, tmp_path)
    with pytest.raises(UserError, match=r"batchInvariant.*change with the length"):
        _engine(tmp_path, batchInvariant=True)
