"""`engine.hf.batchInvariant`: whatever is beside a sample, wherever it runs and goes on, its tokens and log-probs are the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.models.published import Parameters
from streamrl_workers.stream.packing import pack_int32, unpack_int32
from support.engine_requests import request, sampling
from support.vllm_models import make, save

SAMPLES = 12
LONGEST = 140
"""Three classes of lengths."""
SMALL_KV_BYTES = 400 * 1024
"""Of some 350 tokens in float32: long samples rest for others."""
PROMPTS = ["1+2=", "a", "123456789+987654321=", "0-0", "1+2="]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = save("qwen2", tmp_path_factory.mktemp("model"))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


@dataclass
class Sample:
    """What has come of one, on any engine."""

    request: pb.SampleRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    observed: list[int] = field(default_factory=list)
    ended: bool = False

    def take(self, delta: Delta) -> None:
        assert delta.error is None and not self.ended
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.observed += delta.observation_tokens
        self.ended = delta.finish_reason is not None

    def rest(self) -> pb.SampleRequest:
        """What another generator is asked for."""
        if not self.tokens:
            return self.request
        asked = pb.SampleRequest()
        asked.CopyFrom(self.request)
        asked.prefix_tokens = pack_int32([*unpack_int32(asked.prefix_tokens), *self.observed, *self.tokens])
        asked.context_tokens += len(self.observed)
        asked.observation = ""
        return asked


def samples(seed: int) -> dict[int, Sample]:
    rng = Random(seed)
    return {lease: Sample(_drawn(lease, rng)) for lease in range(SAMPLES)}


def _drawn(lease: int, rng: Random) -> pb.SampleRequest:
    limits = sampling(
        max_tokens=rng.choice((1, 9, 70, LONGEST)),
        temperature=rng.choice((1.0, 1.0, 0.7, 0.0)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
    )
    turns: dict[str, Any] = {}
    if rng.random() < 0.3:  # behind a turn of ten tokens
        turns = {"prefix": range(10), "context_tokens": 10, "observation": "go 12\n", "has_turns": True}
    return request(lease, rng.choice(PROMPTS), seed=lease, limits=limits, **turns)


def engine_for(
    kind: str,
    tokenizer: PreTrainedTokenizerFast,
    *,
    slots: int,
    dtype: torch.dtype,
    invariant: bool = True,
    kv_bytes: int = 2**24,
) -> HfEngine:
    weights = Parameters(make(kind, seed=3).to(dtype)).snapshot()
    model = make(kind, seed=0).to(dtype)
    engine = HfEngine(
        model=model, tokenizer=tokenizer, end_ids=frozenset(), slots=slots, batch_invariant=invariant, kv_bytes=kv_bytes
    )
    engine.load_weights(version=1, tensors=weights)
    return engine


def alone(engine: HfEngine, wanted: dict[int, Sample]) -> dict[int, Sample]:
    """One after the other."""
    for sample in wanted.values():
        for delta in engine.add([sample.request]):
            sample.take(delta)
        while engine.active():
            for delta in engine.step():
                sample.take(delta)
    return wanted


def disturbed(engines: Sequence[HfEngine], wanted: dict[int, Sample], rng: Random) -> int:
    """Samples join random neighbours at random moments, and go on elsewhere; returns how often they did."""
    waiting, places, moved = list(wanted), dict[int, HfEngine](), 0
    kinds = ["step"] * 40 + ["add"] * 5 + ["takeover"]
    while waiting or places:
        engine, kind = rng.choice(engines), rng.choice(kinds)
        given: list[Delta] = []
        if kind == "add":
            rng.shuffle(waiting)
            coming = waiting[: rng.randint(0, engine.free())]
            del waiting[: len(coming)]
            places |= dict.fromkeys(coming, engine)
            given = engine.add([wanted[lease].rest() for lease in coming])
        elif kind == "takeover" and places and moved < SAMPLES:
            lease = rng.choice(list(places))
            places.pop(lease).cancel({lease})
            waiting.append(lease)
            moved += bool(wanted[lease].tokens)
        else:
            given = engine.step()
        for delta in given:
            wanted[delta.lease].take(delta)
            if delta.finish_reason is not None:
                del places[delta.lease]
    return moved


def differing(kind: str, tokenizer: PreTrainedTokenizerFast, *, seed: int, **options: Any) -> list[int]:
    """Samples whose tokens or log-probs are others where there are neighbours."""
    expected = alone(engine_for(kind, tokenizer, slots=1, **options), samples(seed))
    engines = [
        engine_for(kind, tokenizer, slots=slots, kv_bytes=kv_bytes, **options)
        for slots, kv_bytes in ((2, 2**24), (SAMPLES, 2**24), (7, SMALL_KV_BYTES))
    ]
    found = samples(seed)
    assert disturbed(engines, found, Random(seed)) >= 3
    return [
        lease
        for lease, sample in found.items()
        if (sample.tokens, sample.logprobs) != (expected[lease].tokens, expected[lease].logprobs)
    ]


@pytest.mark.parametrize("seed", [0, *(pytest.param(other, marks=pytest.mark.soak) for other in (1, 2))])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2", torch.float32), ("llama", torch.float32), ("qwen3", torch.bfloat16)]
)
def test_samples_are_the_same_bits_wherever_they_run(
    kind: str, dtype: torch.dtype, seed: int, endless: PreTrainedTokenizerFast
) -> None:
    assert differing(kind, endless, seed=seed, dtype=dtype) == []


def test_without_it_neighbours_change_the_last_digits(endless: PreTrainedTokenizerFast) -> None:
    assert differing("qwen2", endless, seed=0, dtype=torch.float32, invariant=False)


def test_a_machine_where_places_matter_is_refused(
    endless: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that adds the least to one row of a block, as kernels may that treat the last row by itself."""
    engine = HfEngine(
        model=make("qwen2", seed=0), tokenizer=endless, end_ids=frozenset(), slots=2, batch_invariant=True
    )
    head = engine._runner.model.lm_head

    def by_place(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (hidden,) = inputs
        if hidden.shape[0] > 1:
            hidden = torch.cat([hidden[:-1], hidden[-1:] * (1 + 1e-6)])
        return (hidden,)

    head.register_forward_pre_hook(by_place)
    with pytest.raises(ValueError, match="batchInvariant: cannot be kept on this machine"):
        engine.load_weights(version=1, tensors=Parameters(make("qwen2", seed=3)).snapshot())


def test_a_mixture_of_experts_is_refused(endless: PreTrainedTokenizerFast) -> None:
    sizes = {
        "vocab_size": 32,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    with pytest.raises(UserError, match="cannot be kept for a mixture of experts, which Qwen3MoeForCausalLM is"):
        HfEngine(model=model, tokenizer=endless, end_ids=frozenset(), slots=2, batch_invariant=True)
