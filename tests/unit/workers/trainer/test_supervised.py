"""Supervised learning: loss and gradient against plain float64 loops, in any order and cut, weighed or not; the loss of held-out rows."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.stream.packing import pack_int32, unpack_int32
from support.tiny_trainer import VOCABULARY, engine_on, tiny_engine, tiny_model, tiny_worker
from support.trainer_groups import trainer_spec


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def row(number: int, *, reward: float = 0.0, weight: float | None = None, turns: bool = False) -> pb.Group:
    """A group of one demonstration, as the scheduler makes it; with `turns` the middle third is read, and begins anew."""
    rng = random.Random(number)
    prompt, tokens = ([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))] for _ in range(2))
    sample = pb.Sample(
        group_id=number,
        prompt_tokens=pack_int32(prompt),
        tokens=pack_int32(tokens),
        logprobs=bytes(4 * len(tokens)),
        spans=[pb.VersionSpan(tokens=len(tokens))],
        reward=reward,
        weight=weight,
        segments=_turns(len(tokens)) if turns else [],
    )
    return pb.Group(group_id=number, samples=[sample], size_bytes=sample.ByteSize())


def _turns(tokens: int) -> list[pb.Segment]:
    read = tokens // 3
    return [
        pb.Segment(tokens=tokens - 2 * read),
        pb.Segment(tokens=read, observation=True, context=read > 0),
        pb.Segment(tokens=read),
    ]


ROWS = [row(number, reward=number % 2) for number in range(8)]
WEIGHED = [row(number, weight=(0.25, 1.0, 3.5)[number % 3], turns=number % 2 == 0) for number in range(8)]


def cross_entropy(groups: list[pb.Group], model: torch.nn.Module) -> torch.Tensor:
    """From the definition: one row at a time, one token behind the other, the mean over all tokens, each times its row's weight."""
    losses = []
    for sample in (sample for group in groups for sample in group.samples):
        text, tokens = list(unpack_int32(sample.prompt_tokens)), list(unpack_int32(sample.tokens))
        weight = sample.weight if sample.HasField("weight") else 1.0
        for segment in sample.segments or [pb.Segment(tokens=len(tokens))]:
            text = [] if segment.context else text
            for _ in range(segment.tokens):
                token = tokens.pop(0)
                if not segment.observation:
                    logits = model(input_ids=torch.tensor([text])).logits[0, -1]
                    losses.append(weight * (torch.logsumexp(logits, dim=0) - logits[token]))
                text.append(token)
    return torch.stack(losses).mean()


def trained(groups: list[pb.Group], **trainer: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of a step."""
    spec = trainer_spec(rule="supervised", gradientClipNorm=1e6, **trainer)
    engine = engine_on(worker := tiny_worker(spec), spec=spec)
    engine.begin_step(0, attempt=1)
    for group in groups:
        engine.add([group])
        engine.advance(idle=False)
    return engine.finish_step(), worker.gradients()


def furthest(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Of the largest gradient."""
    assert got.keys() == want.keys()
    scale = max(float(gradient.norm()) for gradient in want.values())
    return max(float((got[name].double() - want[name].double()).norm()) for name in want) / scale


@pytest.mark.parametrize("rows", [ROWS, WEIGHED], ids=["alike", "weighed, with turns"])
def test_loss_and_gradient_are_those_of_the_definition(rows: list[pb.Group]) -> None:
    model = tiny_model().double()
    loss = cross_entropy(rows, model)
    loss.backward()
    metrics, gradients = trained(rows)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert furthest(gradients, {name: p.grad for name, p in model.named_parameters()}) <= 1e-4
    measured = ("train_infer_logprob_diff_mean", "clip_fraction", "masked_fraction", "sequence_clip_fraction")
    assert [metrics[name] for name in measured] == [0.0] * 4, "nobody drew these tokens"
    assert not [name for name in metrics if "/" in name]


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(range(len(ROWS))), budget=st.integers(16, 200))
def test_order_and_cut_change_nothing(order: list[int], budget: int) -> None:
    expected, gradients = trained(WEIGHED)
    metrics, others = trained([WEIGHED[number] for number in order], microBatchTokens=budget)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert furthest(others, gradients) <= 1e-5


def test_the_held_out_loss_is_that_of_the_weights_as_they_are_and_moves_nothing() -> None:
    held_out = [sample for group in (row(20), row(21), row(22)) for sample in group.samples]
    engine = tiny_engine(trainer_spec(rule="supervised", microBatchTokens=16))
    expected = cross_entropy([row(20), row(21), row(22)], tiny_model().double()).item()
    assert engine.held_out_loss(held_out) == pytest.approx(expected, rel=1e-5)
    weighed = [sample for group in WEIGHED for sample in group.samples]
    assert engine.held_out_loss(weighed) == pytest.approx(
        cross_entropy(WEIGHED, tiny_model().double()).item(), rel=1e-5
    )
    before = engine.held_out_loss(held_out)
    losses = []
    for step in range(3):
        engine.begin_step(step, attempt=1)
        engine.add([row(20), row(21), row(22)])
        losses.append(engine.finish_step()["loss"])
        assert engine.held_out_loss(held_out) == engine.held_out_loss(held_out)
    assert losses[0] == pytest.approx(before, rel=1e-5), "measuring is no update"
    assert losses == sorted(losses, reverse=True)
