"""The engine `hf` on today's model families: log-probs of what it draws are those of plain transformers, or it refuses by name."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.errors import UserError
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import Delta, EngineOptions
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.models.published import Parameters
from streamrl_workers.weights.hashing import TensorBytes
from support.engine_requests import request, sampling
from support.model_families import ALL_FAMILIES, FAMILIES, LONGROPE, save_tiny
from support.prefix_logprobs import prefix_logprobs

DEFAULT = (*FAMILIES, "mistral_window", "qwen3_5", "lfm2")
"""Each kind of layer once: the rest is in `make soak`."""
REFUSED = {"nemotron_h": "one token at a time, it does not keep time_step_limit"}
CHANGES: dict[str, dict[str, Any]] = {
    "llama4": {"attn_temperature_tuning": False},  # the tiny model has it from 16 tokens on, where the engine stops
}
PROMPTS = ("7", "1+1=", "abcabc" * 3, "0123456789" * 3, "9" * 32, "8-3=" * 15)
"""One is a single token, one as long as the switch of LongRoPE, one longer; the others grow across it, and across a window of 16."""
GENERATED = 48
SWAP_STEP = 8


def _published(folder: Path) -> dict[str, TensorBytes]:
    return Parameters(_plain(folder)).snapshot()


def _engine(folder: Path, *, max_tokens: int = 0, **spec: object) -> HfEngine:
    options = EngineOptions(
        spec=HfSpec.model_validate({"slots": 4, **spec}), model_path=str(folder), threads=1, max_tokens=max_tokens
    )
    return create_hf(options)


def _gained(engine: HfEngine, *, swap: dict[str, TensorBytes] | None = None) -> dict[int, list[Delta]]:
    """More requests than slots, so that rows move; the last ones come as others end. `swap`: weights that come in the midst."""
    waiting = [
        request(number, prompt, seed=number, limits=sampling(max_tokens=GENERATED - 6 * number))
        for number, prompt in enumerate(PROMPTS)
    ]
    gained: dict[int, list[Delta]] = defaultdict(list)
    steps = 0
    while waiting or engine.active():
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        for delta in [*engine.add(admitted), *engine.step()]:
            assert delta.error is None
            gained[delta.lease].append(delta)
        steps += 1
        if swap is not None and steps == SWAP_STEP:
            engine.load_weights(version=2, tensors=swap)
    return gained


def _plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.soak])
        for name in ALL_FAMILIES
        if name not in REFUSED
    ],
)
def test_logprobs_are_those_of_each_prefix(family: str, tmp_path: Path) -> None:
    folders = {
        version: save_tiny(family, tmp_path / str(version), seed=version, **CHANGES.get(family, {}))
        for version in (1, 2)
    }
    engine = _engine(folders[1])
    engine.load_weights(version=1, tensors=_published(folders[1]))
    plain = {version: _plain(folder) for version, folder in folders.items()}
    versions = set()
    for deltas in _gained(engine, swap=_published(folders[2])).values():
        tokens = [*next(delta.prompt_tokens for delta in deltas if delta.prompt_tokens)]
        for delta in deltas:
            first = len(tokens)
            tokens += delta.tokens
            with torch.inference_mode():
                expected = prefix_logprobs(plain[delta.version], tokens, places=range(first, len(tokens)))
            torch.testing.assert_close(torch.tensor(delta.logprobs), expected, rtol=1e-4, atol=1e-4)
            versions.add(delta.version)
    assert versions == {1, 2}


@pytest.mark.parametrize(("family", "line"), REFUSED.items())
def test_refused_by_name(family: str, line: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    with pytest.raises(ValueError, match=line):
        _engine(tmp_path).load_weights(version=1, tensors=_published(tmp_path))


@pytest.mark.parametrize(("family", "capacity"), [("gemma3", 134), ("qwen3_5", 117)])
def test_bounded_memory_counts_windows_and_states(family: str, capacity: int, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    tensors = _published(tmp_path)
    free, bound = _engine(tmp_path), _engine(tmp_path, kvCacheBytes="64Ki", max_tokens=99)
    for engine in (free, bound):
        engine.load_weights(version=1, tensors=tensors)
    assert bound.kv_load().capacity_tokens == capacity
    expected = {lease: _tokens(deltas) for lease, deltas in _gained(free).items()}
    bytes_held, rows = [], []
    step = bound.step

    def watched() -> list[Delta]:
        deltas = step()
        load = bound.kv_load()
        assert load.used_tokens <= load.capacity_tokens
        bytes_held.append(bound._runner.cache.size_bytes)
        rows.append(len(bound._batch))
        return deltas

    bound.step = watched  # type: ignore[method-assign] # the engine steps, and is looked at
    assert {lease: _tokens(deltas) for lease, deltas in _gained(bound).items()} == expected
    assert max(bytes_held) <= 64 * 2**10 * 7 / 8
    assert min(rows) < max(rows) < 4, "the youngest have rested"


def _tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_layers_with_states_and_invariance_of_batches_are_refused_together(tmp_path: Path) -> None:
    save_tiny("qwen3_5", tmp_path)
    with pytest.raises(UserError, match=r"batchInvariant.*carry a state"):
        _engine(tmp_path, batchInvariant=True)


def test_longrope_and_invariance_of_batches_are_refused_together(tmp_path: Path) -> None:
    save_tiny(LONGROPE, tmp_path)
    with pytest.raises(UserError, match=r"batchInvariant.*change with the length"):
        _engine(tmp_path, batchInvariant=True)
