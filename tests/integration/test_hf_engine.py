"""The engine `hf` against transformers itself: `generate`, plain forwards, log-probs."""

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.answer_ends import written_end
from streamrl_workers.generator.engines import create_hf
from streamrl_workers.generator.engines.base import Delta, EngineOptions
from streamrl_workers.generator.engines.hf import runner
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.generator.engines.hf.kv_cache import LengthBucket
from streamrl_workers.models.published import Parameters
from streamrl_workers.stream.packing import count_32, unpack_int32
from streamrl_workers.weights.hashing import TensorBytes, tensors_hash
from support import engine_requests
from support.engine_requests import sampling

CHARS = "0123456789+-= abcdefgh\n"
END = len(CHARS)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def char_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    vocab = {char: index for index, char in enumerate(CHARS)} | {"<end>": END}
    core = Tokenizer(models.WordLevel(vocab, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, **special)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return char_tokenizer(eos_token="<end>")


@pytest.fixture(scope="module")
def endless() -> PreTrainedTokenizerFast:
    """Without an end: every completion is as long as it may be."""
    return char_tokenizer()


def tiny(seed: int, *, spread: float = 0.08) -> Qwen2ForCausalLM:
    """A Qwen2 whose logits are spread enough for ties to be unlikely."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARS) + 1, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, initializer_range=spread, tie_word_embeddings=True,
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def published(model: PreTrainedModel) -> dict[str, TensorBytes]:
    return Parameters(model).snapshot()


@pytest.fixture(scope="module")
def model() -> Qwen2ForCausalLM:
    return tiny(0)


def engine_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, slots: int = 4, positions: int | None = None
) -> HfEngine:
    config = copy.copy(model.config)
    config.max_position_embeddings = positions or config.max_position_embeddings
    structure = AutoModelForCausalLM.from_config(config)
    end_ids = frozenset(written_end(tokenizer, chat=False))
    engine = HfEngine(model=structure, tokenizer=tokenizer, end_ids=end_ids, slots=slots)
    engine.load_weights(version=1, tensors=published(model))
    return engine


def request(number: int, prompt: str, **changes: object) -> pb.SampleRequest:
    return engine_requests.request(number, prompt, **{"seed": number, **changes})


def held(engine: HfEngine) -> bytes:
    """The hash of the bytes in the engine."""
    return tensors_hash(Parameters(engine._runner.model).snapshot())


class Collected:
    """Deltas put together by request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.versions: dict[int, list[int]] = defaultdict(list)
        self.prompt: dict[int, tuple[int, ...]] = {}
        self.last: dict[int, Delta] = {}

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            rid = delta.lease
            assert rid not in self.last, "a delta after the last"
            assert len(delta.tokens) == len(delta.logprobs)
            assert (delta.prompt_tokens is not None) == (rid not in self.prompt)
            self.prompt.setdefault(rid, delta.prompt_tokens or ())
            self.tokens[rid] += delta.tokens
            self.logprobs[rid] += delta.logprobs
            self.versions[rid] += [delta.version] * len(delta.tokens)
            assert (delta.finish_reason is None) == (delta.text is None)
            if delta.finish_reason is not None:
                self.last[rid] = delta


def finish(engine: HfEngine, requests: Sequence[pb.SampleRequest], into: Collected | None = None) -> Collected:
    """Generate all, refilling every slot as it frees."""
    collected, waiting = into or Collected(), list(requests)
    while waiting or engine.active():
        free = engine.free()
        collected.take(engine.add(waiting[:free]))
        del waiting[:free]
        collected.take(engine.step())
    return collected


def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], *, temperature: float = 1.0
) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0].float() / temperature
    picked = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion).unsqueeze(-1))
    return picked.squeeze(-1).tolist()


PROMPTS = ["1", "12+3=", "a b c d e f g h", "0-1", "7", "123456789+123456789=", "hhh", "=+-"]


def test_greedy_tokens_equal_generates(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    samplings = [sampling(temperature=0.0, max_tokens=5 + 6 * i) for i in range(len(PROMPTS))]
    requests = [request(i, p, limits=s) for i, (p, s) in enumerate(zip(PROMPTS, samplings, strict=True))]
    collected = finish(engine_for(model, tokenizer, slots=3), requests)
    for req in requests:
        ids = tokenizer(req.prompt, return_tensors="pt")["input_ids"]
        ends = {"eos_token_id": END, "pad_token_id": END}
        whole = model.generate(
            ids, do_sample=False, max_new_tokens=req.sampling.max_tokens, attention_mask=torch.ones_like(ids), **ends
        )
        assert collected.tokens[req.lease] == whole[0, ids.shape[1] :].tolist()
        assert collected.prompt[req.lease] == tuple(ids[0].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_equal_a_plain_forward(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    limits = sampling(temperature=temperature, top_p=0.8, top_k=9, max_tokens=40)
    collected = finish(engine_for(model, tokenizer), [request(i, p, limits=limits) for i, p in enumerate(PROMPTS)])
    for i in range(len(PROMPTS)):
        expected = plain_logprobs(model, collected.prompt[i], collected.tokens[i], temperature=temperature)
        assert collected.logprobs[i] == pytest.approx(expected, abs=1e-4)


def test_logprobs_belong_to_their_version_after_a_load_in_between(tokenizer: PreTrainedTokenizerFast) -> None:
    versions = {1: tiny(1), 2: tiny(2), 3: tiny(3)}
    engine, collected = engine_for(versions[1], tokenizer, slots=8), Collected()
    collected.take(engine.add([request(i, p, limits=sampling(max_tokens=30)) for i, p in enumerate(PROMPTS)]))
    for version in (2, 3):
        for _ in range(7):
            collected.take(engine.step())
        engine.load_weights(version=version, tensors=published(versions[version]))
        assert held(engine) == tensors_hash(published(versions[version]))
    finish(engine, [], collected)
    assert {version for spans in collected.versions.values() for version in spans} == {1, 2, 3}
    for i in range(len(PROMPTS)):
        by_version = {v: plain_logprobs(m, collected.prompt[i], collected.tokens[i]) for v, m in versions.items()}
        expected = [by_version[version][place] for place, version in enumerate(collected.versions[i])]
        assert collected.logprobs[i] == pytest.approx(expected, abs=1e-4)


def test_logprobs_stay_right_while_rows_change_places_by_length(
    model: Qwen2ForCausalLM, endless: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and long answers together, rows that outgrow others, one that comes long: attention takes buckets of rows."""
    widths: list[int] = []

    def spy(bucket: LengthBucket, *tensors: torch.Tensor, **options: float | None) -> torch.Tensor:
        widths.append(bucket.width)
        return original(bucket, *tensors, **options)

    original = runner._bucket_attention
    monkeypatch.setattr(runner, "_bucket_attention", spy)
    limits = [3, 130, 9, 70, 4, 140, 20, 80, 5, 6, 90, 2]
    requests = [
        request(i, PROMPTS[i % 8], limits=sampling(max_tokens=limit), prefix=(2,) * 65 if i == 7 else ())
        for i, limit in enumerate(limits)
    ]
    collected = finish(engine_for(model, endless, slots=5), requests)
    assert min(widths) <= 64 < max(widths)
    for req in requests:
        i, tokens = req.lease, [*unpack_int32(req.prefix_tokens), *collected.tokens[req.lease]]
        assert len(tokens) == req.sampling.max_tokens
        expected = plain_logprobs(model, collected.prompt[i], tokens)[count_32(req.prefix_tokens) :]
        assert collected.logprobs[i] == pytest.approx(expected, abs=1e-4)


def test_a_prompt_cached_under_old_weights_is_not_used(tokenizer: PreTrainedTokenizerFast) -> None:
    new, engine = tiny(2), engine_for(tiny(1), tokenizer)
    finish(engine, [request(0, "12+3=")])
    engine.load_weights(version=2, tensors=published(new))
    collected = finish(engine, [request(1, "12+3=")])
    assert collected.logprobs[1] == pytest.approx(
        plain_logprobs(new, collected.prompt[1], collected.tokens[1]), abs=1e-4
    )


def test_a_seed_decides_whatever_the_batch(model: Qwen2ForCausalLM, endless: PreTrainedTokenizerFast) -> None:
    requests = [
        request(i, PROMPTS[i % 8], seed=2**64 - 1 - 7 * i, limits=sampling(max_tokens=3 + 5 * i)) for i in range(12)
    ]
    together = finish(engine_for(model, endless, slots=5), requests)
    alone = finish(engine_for(model, endless, slots=1), list(reversed(requests)))
    assert together.tokens == alone.tokens
    other_seed = finish(engine_for(model, endless), [request(11, PROMPTS[3], seed=5, limits=requests[11].sampling)])
    assert other_seed.tokens[11] != together.tokens[11]


@pytest.mark.parametrize("held", [1, 2, 9, 19])
def test_a_prefix_continues_to_the_same_tokens(
    model: Qwen2ForCausalLM, endless: PreTrainedTokenizerFast, held: int
) -> None:
    whole = finish(engine_for(model, endless), [request(0, "12+3=", seed=3)])
    assert len(whole.tokens[0]) == 20
    again = request(7, "12+3=", seed=3, prefix=tuple(whole.tokens[0][:held]))
    rest = finish(engine_for(model, endless), [request(1, "abc"), again])
    assert rest.tokens[7] == whole.tokens[0][held:]
    assert rest.logprobs[7] == pytest.approx(whole.logprobs[0][held:], abs=1e-4)
    assert rest.last[7].text == whole.last[0].text


def test_a_complete_prefix_ends_at_once(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = engine_for(model, tokenizer)
    full = request(0, "1", prefix=(1, 2), limits=sampling(max_tokens=2))
    ended = engine.add([full, request(1, "1", prefix=(1, END))])
    assert [(d.finish_reason, d.tokens, d.text) for d in ended] == [("length", (), "12"), ("stop", (), "1")]
    assert engine.active() == 0


def test_the_end_token_ends_and_is_among_the_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    collected = finish(
        engine_for(tiny(0), tokenizer), [request(i, "1", limits=sampling(max_tokens=150)) for i in range(8)]
    )
    stopped = [i for i, last in collected.last.items() if last.finish_reason == "stop"]
    assert stopped
    for i in stopped:
        assert collected.tokens[i].index(END) == len(collected.tokens[i]) - 1
        assert "<end>" not in (collected.last[i].text or "")


def test_stop_strings_end_and_are_cut_from_the_text(model: Qwen2ForCausalLM, endless: PreTrainedTokenizerFast) -> None:
    free = finish(engine_for(model, endless), [request(0, "1", limits=sampling(max_tokens=60))])
    text = free.last[0].text or ""
    stop = text[10:13]
    limits = sampling(max_tokens=60, stop=["zzz", stop])
    cut = finish(engine_for(model, endless), [request(0, "1", limits=limits)])
    assert cut.last[0].finish_reason == "stop"
    assert cut.last[0].text == text[: text.index(stop)]
    assert cut.tokens[0] == free.tokens[0][: text.index(stop) + len(stop)]


def test_cancel_frees_slots_and_leaves_the_others_alone(
    model: Qwen2ForCausalLM, endless: PreTrainedTokenizerFast
) -> None:
    requests = [request(i, PROMPTS[i], pinned=i % 2 == 0) for i in range(4)]
    expected = finish(engine_for(model, endless), requests)
    engine, collected = engine_for(model, endless), Collected()
    collected.take(engine.add(requests))
    collected.take(engine.step())
    assert (engine.active(), engine.pinned_active(), engine.free()) == (4, 2, 0)
    engine.cancel({0, 2, 99})
    assert (engine.active(), engine.pinned_active(), engine.free()) == (2, 0, 2)
    finish(engine, [], collected)
    assert [collected.tokens[i] for i in (1, 3)] == [expected.tokens[i] for i in (1, 3)]
    assert set(collected.last) == {1, 3}


def test_a_prompt_without_room_ends_a_sample_that_has_turns(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine = engine_for(model, tokenizer, positions=30)
    later = [request(lease, "1" * (30 + lease), has_turns=True) for lease in (0, 9)]
    ended = engine.add([*later, request(2, "", has_turns=True), request(3, "1" * 29, has_turns=True)])
    assert [(d.lease, d.finish_reason, d.tokens) for d in ended[:2]] == [(0, "length", ()), (9, "length", ())]
    assert [(d.lease, d.finish_reason) for d in ended[2:]] == [(2, "error")]
    assert len(finish(engine, []).tokens[3]) == 1


def test_what_cannot_run_comes_back_as_an_error(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = engine_for(model, tokenizer, positions=30)
    ended = engine.add([request(0, "1" * 30), request(1, ""), request(2, "1", prefix=(999,)), request(3, "1" * 29)])
    assert [(d.lease, d.finish_reason) for d in ended] == [(0, "error"), (1, "error"), (2, "error")]
    assert "30 tokens" in (ended[0].error or "")
    collected = finish(engine, [])
    assert (collected.last[3].finish_reason, len(collected.tokens[3])) == ("length", 1)


def test_broken_weights_give_errors_not_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    broken, whole = tiny(0), tiny(0)
    broken.model.norm.weight.data.fill_(float("nan"))
    engine, collected = engine_for(broken, tokenizer), Collected()
    collected.take(engine.add([request(0, "1"), request(1, "2")]))
    collected.take(engine.step())
    assert {last.finish_reason for last in collected.last.values()} == {"error"}
    engine.load_weights(version=2, tensors=published(whole))
    after = finish(engine, [request(2, "1")])
    assert after.logprobs[2] == pytest.approx(plain_logprobs(whole, after.prompt[2], after.tokens[2]), abs=1e-4)


def test_a_group_shares_one_prefill(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, forwards = engine_for(model, tokenizer, slots=8), []
    plain = Qwen2ForCausalLM.base_model.fget(engine._runner.model).forward
    monkeypatch.setattr(
        engine._runner.model.model, "forward", lambda **k: forwards.append(k["input_ids"].shape) or plain(**k)
    )
    engine.add([request(i, "12+3=") for i in range(3)] + [request(3, "7-1")])
    assert forwards == [(2, 4)]
    engine.add([request(i, "12+3=") for i in range(4, 8)])
    assert len(forwards) == 1


def test_the_cache_grows_while_sequences_run(endless: PreTrainedTokenizerFast) -> None:
    model = tiny(4)
    requests = [request(i, "12+3=", limits=sampling(max_tokens=500)) for i in range(6)]
    collected = finish(engine_for(model, endless), requests)
    longest = max(collected.tokens, key=lambda i: len(collected.tokens[i]))
    assert len(collected.tokens[longest]) > 128
    expected = plain_logprobs(model, collected.prompt[longest], collected.tokens[longest])
    assert collected.logprobs[longest] == pytest.approx(expected, abs=1e-4)


SMALL = {
    "vocab_size": len(CHARS) + 1, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": END,
}  # fmt: skip
OTHERS = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 16},
    "gemma": SMALL | {"head_dim": 8},
    "phi": SMALL,
    "gpt2": {
        "vocab_size": len(CHARS) + 1,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": END,
    },
    "gpt_neox": SMALL,
    "opt": SMALL | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mixtral": SMALL | {"num_local_experts": 4, "sliding_window": None},
    "mistral": SMALL | {"sliding_window": 16},
    "gemma2": SMALL | {"head_dim": 8},
}


@pytest.mark.parametrize("model_type", sorted(OTHERS))
def test_other_architectures(model_type: str, tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**OTHERS[model_type])).eval()
    collected = finish(engine_for(model, tokenizer), [request(i, p) for i, p in enumerate(PROMPTS)])
    for i in range(len(PROMPTS)):
        assert collected.logprobs[i] == pytest.approx(
            plain_logprobs(model, collected.prompt[i], collected.tokens[i]), abs=1e-4
        )


REFUSED = {
    "mamba": {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bloom": {"vocab_size": 24, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"vocab_size": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
}


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_unsupported_architectures_are_refused_by_name(model_type: str, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**REFUSED[model_type]))
    with pytest.raises(ValueError, match=f"{model_type}.*not supported by engine hf"):
        HfEngine(model=model, tokenizer=tokenizer, end_ids=frozenset(), slots=2)


def test_weights_that_do_not_fit_change_nothing(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    engine, good = engine_for(model, tokenizer), published(model)
    before, name = held(engine), "model.norm.weight"
    bad = {
        "does not have": good | {"extra": good[name]},
        "lack": {n: t for n, t in good.items() if n != name},
        "model has": good | {name: good[name]._replace(dtype="float16")},
        "bytes": good | {name: good[name]._replace(data=good[name].data[:-4])},
    }
    for text, tensors in bad.items():
        with pytest.raises(ValueError, match=text):
            engine.load_weights(version=9, tensors=tensors)
    assert (engine.version, held(engine)) == (1, before)


def test_tied_tensors_may_be_published_once_or_twice(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    engine, once = engine_for(tiny(7), tokenizer), published(model)
    assert "lm_head.weight" not in once
    for version, tensors in ((2, once), (3, once | {"lm_head.weight": once["model.embed_tokens.weight"]})):
        engine.load_weights(version=version, tensors=tensors)
        assert held(engine) == tensors_hash(once)


def test_created_from_a_folder(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: object) -> None:
    model.save_pretrained(str(tmp_path))
    tokenizer.save_pretrained(str(tmp_path))
    engine = create_hf(EngineOptions(spec=HfSpec(slots=2), model_path=str(tmp_path), threads=1))
    assert engine.version is None
    engine.load_weights(version=0, tensors=published(model))
    assert held(engine) == tensors_hash(published(model))
    assert [len(d.tokens) for d in (*engine.add([request(0, "1")]), *engine.step())] == [1]
