"""Turns behind a context in the engine `hf`: tokens, log-probs and text against plain forwards of the whole sequence."""

from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.model import ScratchModel
from streamrl_workers.answer_ends import written_end
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.generator.engines.hf.engine import HfEngine
from streamrl_workers.models.published import Parameters
from streamrl_workers.models.scratch import build_model, build_tokenizer
from support import engine_requests

POSITIONS = 96
SAMPLING = engine_requests.sampling(max_tokens=7, stop=["\n"])
OBSERVATIONS = ("up\n", "go down\n", "")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(set("0123456789 abcdefghijklmnopqrstuvwxyz?\n"), max_positions=POSITIONS)


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    spec = ScratchModel(hiddenSize=32, layers=2, heads=2, intermediateSize=64, maxPositions=POSITIONS)
    made = build_model(spec, tokenizer=tokenizer, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)  # far from uniform: a wrong context shows
    return made.eval()


def engine_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, *, slots: int = 4) -> HfEngine:
    structure = AutoModelForCausalLM.from_config(model.config)
    end_ids = frozenset(written_end(tokenizer, chat=False))
    engine = HfEngine(model=structure, tokenizer=tokenizer, end_ids=end_ids, slots=slots)
    engine.load_weights(version=1, tensors=Parameters(model).snapshot())
    return engine


@pytest.fixture
def engine(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> HfEngine:
    return engine_for(model, tokenizer)


def request(number: int = 0, prompt: str = "say a number?", **changes: object) -> pb.SampleRequest:
    return engine_requests.request(number, prompt, **{"limits": SAMPLING, "seed": 5, **changes})


def run(engine: HfEngine, *requests: pb.SampleRequest) -> dict[int, list[Delta]]:
    """All deltas of each request."""
    deltas: dict[int, list[Delta]] = {one.lease: [] for one in requests}
    for delta in engine.add(requests):
        deltas[delta.lease].append(delta)
    while engine.active():
        for delta in engine.step():
            deltas[delta.lease].append(delta)
    return deltas


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def test_logprobs_of_later_turns_equal_a_plain_forward(
    engine: HfEngine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer("say a number?")["input_ids"]
    whole: list[int] = []
    made: list[tuple[int, float]] = []  # place in the completion, log-prob
    turn = request()
    for number, observation in enumerate((*OBSERVATIONS, "")):
        deltas = run(engine, turn)[number]
        observed = list(deltas[0].observation_tokens)
        assert observed == tokenizer(turn.observation)["input_ids"]
        assert all(not delta.observation_tokens for delta in deltas[1:])
        whole += observed
        for delta in deltas:
            made += zip(range(len(whole), len(whole) + len(delta.tokens)), delta.logprobs, strict=True)
            whole += delta.tokens
        text = tokenizer.decode(tokens_of(deltas), skip_special_tokens=True)
        assert deltas[-1].text == text.split("\n")[0], "the text of a turn is its own"
        assert deltas[-1].finish_reason in ("stop", "length")
        turn = request(number + 1, prefix=tuple(whole), context_tokens=len(whole), observation=observation)
    with torch.inference_mode():
        logprobs = model(input_ids=torch.tensor([[*prompt, *whole]])).logits[0].log_softmax(-1)
    for place, logprob in made:
        assert logprob == pytest.approx(logprobs[len(prompt) + place - 1, whole[place]].item(), abs=1e-4)


def test_max_tokens_counts_behind_the_context(engine: HfEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    context = tuple(tokenizer("0123456789012345678")["input_ids"])
    endless = engine_requests.sampling(max_tokens=3)
    first = run(engine, request(prefix=context, context_tokens=19, observation="ab", limits=endless))[0]
    assert len(tokens_of(first)) <= 3


def test_a_stop_string_of_an_earlier_turn_does_not_end_this_one(
    engine: HfEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    context = tuple(tokenizer("7\n")["input_ids"])
    deltas = run(engine, request(prefix=context, context_tokens=2, observation="up\n"))[0]
    assert tokens_of(deltas)
    assert "up" not in (deltas[-1].text or "")


def test_a_turn_lost_in_its_midst_goes_on_to_the_same_tokens(
    engine: HfEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    context = tuple(tokenizer("7\n")["input_ids"])
    endless = engine_requests.sampling(max_tokens=7)
    deltas = run(engine, request(prefix=context, context_tokens=2, observation="up\n", limits=endless))[0]
    observed, tokens = deltas[0].observation_tokens, tokens_of(deltas)
    assert len(observed) == 3
    for had in range(1, len(tokens)):
        prefix = (*context, *observed, *tokens[:had])
        again = run(engine, request(prefix=prefix, context_tokens=5, limits=endless))[0]
        assert tokens_of(again) == tokens[had:]
        assert again[-1].text == deltas[-1].text, "the text holds what came before the loss"
        assert not again[0].observation_tokens
    ended = run(engine, request(prefix=(*context, *observed, *tokens), context_tokens=5, limits=endless))[0]
    assert [(delta.tokens, delta.finish_reason) for delta in ended] == [((), deltas[-1].finish_reason)]


@pytest.mark.parametrize("prefix", [POSITIONS - 16, POSITIONS - 13, POSITIONS])
def test_without_room_the_turn_ends_before_its_first_token(
    prefix: int, engine: HfEngine, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The prompt has 13 tokens, the observation 3."""
    context = tuple(tokenizer("0" * prefix)["input_ids"])
    deltas = run(engine, request(prefix=context, context_tokens=prefix, observation="up\n"))[0]
    assert [(d.tokens, d.finish_reason, d.error, d.observation_tokens) for d in deltas] == [((), "length", None, ())]


def test_the_last_position_is_used(engine: HfEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    prefix = POSITIONS - 17
    context = tuple(tokenizer("0" * prefix)["input_ids"])
    deltas = run(engine, request(prefix=context, context_tokens=prefix, observation="up\n"))[0]
    assert len(tokens_of(deltas)) == 1
    assert len(deltas[0].observation_tokens) == 3


def test_an_observation_that_cannot_be_tokenized_says_so(engine: HfEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    context = tuple(tokenizer("7\n")["input_ids"])
    (delta,) = run(engine, request(prefix=context, context_tokens=2, observation="\N{SNOWMAN}"))[0]
    assert delta.finish_reason == "error"
    assert delta.error is not None
    assert delta.error.startswith("the observation cannot be tokenized")


def test_turns_of_many_samples_beside_first_turns(
    engine: HfEngine, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A batch of mixed turns gives what each gives alone."""
    context = tuple(tokenizer("12\nup\n")["input_ids"])
    requests = [
        request(0),
        request(1, seed=6, prefix=context, context_tokens=6, observation="down\n"),
        request(2, seed=7, prefix=context, context_tokens=6),
        request(3, seed=8, prefix=context, context_tokens=3),
    ]
    together = run(engine, *requests)
    alone = engine_for(model, tokenizer, slots=1)
    for one in requests:
        assert tokens_of(together[one.lease]) == tokens_of(run(alone, one)[one.lease])
