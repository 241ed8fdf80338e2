"""Keys and values of the engine `hf` within a bound in bytes: long answers, updates of weights, what cannot fit."""

import gc
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from streamrl.errors import UserError
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import Delta, EngineOptions
from streamrl_workers.generator.engines.hf import runner
from streamrl_workers.generator.engines.hf.engine import HfEngine
from support.engine_requests import request, sampling
from support.vllm_models import POSITIONS, logprobs, make, published, save

BOUND = "256Ki"
"""512 bytes a token: 358 tokens, so one sample of 200 fits and four do not."""
LONGEST = 200
CLOSE = 1e-4
PROMPTS = ["1+2=", "a", "123456789", "h", "0-0", "98", "c+d", "77"]


def made(folder: Path, *, bound: str | None, max_tokens: int = LONGEST) -> HfEngine:
    spec = HfSpec.model_validate({"slots": 8} | ({} if bound is None else {"kvCacheBytes": bound}))
    save("qwen2", folder)
    endless = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    endless.save_pretrained(folder)  # without an end: every completion is as long as it may be
    options = EngineOptions(spec=spec, model_path=str(folder), threads=1, max_tokens=max_tokens)
    engine = create_hf(options)
    assert isinstance(engine, HfEngine)
    return engine


def samples(*, max_tokens: int = LONGEST) -> list:
    limits = sampling(max_tokens=max_tokens)
    return [request(lease, prompt, seed=lease, limits=limits) for lease, prompt in enumerate(PROMPTS)]


class Gained:
    """Of each request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.versions: dict[int, list[int]] = defaultdict(list)
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.ended: dict[int, Delta] = {}

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            assert delta.error is None and delta.lease not in self.ended
            self.tokens[delta.lease] += delta.tokens
            self.logprobs[delta.lease] += delta.logprobs
            self.versions[delta.lease] += [delta.version] * len(delta.tokens)
            self.prompts.setdefault(delta.lease, delta.prompt_tokens or ())
            if delta.finish_reason is not None:
                self.ended[delta.lease] = delta


def run(engine: HfEngine, gained: Gained) -> set[int]:
    """To the end; how many sequences had a row, at each step."""
    rows = set()
    while engine.active():
        gained.take(engine.step())
        cache = engine._runner.cache
        rows.add(len(engine._batch))
        assert cache.size_bytes <= 256 * 2**10 * 7 / 8
        assert engine.kv_load().used_tokens <= engine.kv_load().capacity_tokens
    return rows


def test_long_answers_stay_within_the_bound_and_are_the_same(tmp_path: Path) -> None:
    free, bound = made(tmp_path, bound=None), made(tmp_path, bound=BOUND)
    found = [Gained(), Gained()]
    for engine, gained in zip((free, bound), found, strict=True):
        engine.load_weights(version=1, tensors=published(make("qwen2", seed=3)))
        gained.take(engine.add(samples()))
        assert engine.active() == len(PROMPTS)
    while free.active():
        found[0].take(free.step())
    rows = run(bound, found[1])
    assert min(rows) < 3 < max(rows), "the youngest have rested"
    assert found[1].tokens == found[0].tokens
    assert sum(map(len, found[1].tokens.values())) > 2 * 358
    for lease, values in found[1].logprobs.items():
        assert values == pytest.approx(found[0].logprobs[lease], abs=CLOSE)
    assert bound.kv_load().used_tokens == 0


def test_an_update_holds_no_second_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, gained = made(tmp_path, bound=BOUND), Gained()
    models = {version: make("qwen2", seed=version) for version in (1, 2)}
    engine.load_weights(version=1, tensors=published(models[1]))
    gained.take(engine.add(samples()))
    while len(gained.tokens[0]) < 40:
        gained.take(engine.step())
    alive: list[int] = []
    forward = runner.Runner._forward_padded

    def counted(self: runner.Runner, sequences: list) -> object:
        alive.append(_kv_bytes())
        return forward(self, sequences)

    monkeypatch.setattr(runner.Runner, "prefill_tokens", 64)
    monkeypatch.setattr(runner.Runner, "_forward_padded", counted)
    before = _kv_bytes()
    engine.load_weights(version=2, tensors=published(models[2]))
    assert len(alive) > 3
    assert max(alive) - before <= 64 * 512, "beside the rows at most what one forward has just given"
    run(engine, gained)
    worst = 0.0
    for lease, tokens in gained.tokens.items():
        for version, model in models.items():
            truth = logprobs(model, gained.prompts[lease], tokens)
            pairs = zip(gained.logprobs[lease], truth, gained.versions[lease], strict=True)
            worst = max(worst, *(abs(a - b) for a, b, made_by in pairs if made_by == version), 0.0)
    assert {version for versions in gained.versions.values() for version in versions} == {1, 2}
    assert worst < CLOSE


def _kv_bytes() -> int:
    """Of all tensors that are shaped like keys and values: ends with tokens and the 32 values of a head."""
    tensors = (one for one in gc.get_objects() if issubclass(type(one), torch.Tensor))
    shaped = {one.untyped_storage().data_ptr(): one for one in tensors if one.dim() > 3 and one.shape[-1] == 32}
    return sum(one.untyped_storage().nbytes() for one in shaped.values())


def test_what_rests_is_cancelled_and_counted(tmp_path: Path) -> None:
    engine = made(tmp_path, bound=BOUND)
    engine.load_weights(version=1, tensors=published(make("qwen2", seed=3)))
    engine.add(
        [*samples(max_tokens=100)[:4], *(request(9, "b", seed=9, pinned=True, limits=sampling(max_tokens=150)),)]
    )
    while len(engine._batch) == 5 and engine.active() == 5:
        engine.step()
    if not engine._resting:
        pytest.fail("nobody rests")
    youngest = engine._resting[-1].request.lease
    assert youngest == 9
    assert engine.pinned_active() == 1
    assert engine.free() == 0
    active = engine.active()
    engine.cancel([youngest])
    assert (engine.active(), engine.pinned_active()) == (active - 1, 0)


def test_a_sample_that_never_fits_is_refused_with_the_numbers(tmp_path: Path) -> None:
    engine = made(tmp_path, bound=BOUND, max_tokens=100)
    engine.load_weights(version=1, tensors=published(make("qwen2", seed=3)))
    assert engine.kv_load().capacity_tokens == 358
    small = made(tmp_path, bound="64Ki", max_tokens=80)
    small.load_weights(version=1, tensors=published(make("qwen2", seed=3)))
    assert small.kv_load().capacity_tokens == 89
    (refused,) = small.add([request(1, "1" * 10, limits=sampling(max_tokens=80))])
    assert refused.finish_reason == "error"
    assert refused.error == (
        "prompt and completion may have 10 + 80 tokens, and keys and values of 89 fit: raise kvCacheBytes or lower maxTokens"
    )
    assert small.add([request(2, "1" * 9, limits=sampling(max_tokens=80))]) == []
    small.cancel([2])
    (ended,) = small.add([request(3, "1" * 9, prefix=[1] * 80, context_tokens=80)])
    assert ended.finish_reason == "length", "a later turn ends at the bound as at the last position"


def test_a_bound_below_one_sample_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        made(tmp_path, bound="64Ki", max_tokens=89)
    error = refused.value
    assert (error.field, error.got) == ("engine.hf.kvCacheBytes", "room for 89")
    assert "at least 90 tokens" in error.rule
    made(tmp_path, bound="256Ki", max_tokens=10_000)  # the model has 256 positions, so no sample has more
    assert POSITIONS < 358
