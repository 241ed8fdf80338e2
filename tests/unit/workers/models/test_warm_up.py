"""Warm-up: what carries loss, the schedule, and that it learns."""

import itertools

import pytest
import torch
from torch.nn.functional import log_softmax

from streamrl.errors import UserError
from streamrl.spec.model import ScratchModel, WarmUp
from streamrl_workers.models.scratch import build_model, build_tokenizer
from streamrl_workers.models.warm_up import IGNORED, WarmUpPair, imitation_loss, make_batch, schedule, warm_up

TINY = ScratchModel.model_validate(
    {"hiddenSize": 16, "layers": 2, "heads": 2, "intermediateSize": 16, "maxPositions": 32}
)
TOKENIZER = build_tokenizer(frozenset("0123456789+="), max_positions=32)
END = TOKENIZER.eos_token_id
PAIRS = [WarmUpPair(prompt="1+2=", target="3"), WarmUpPair(prompt="10+20+3=", target="33")]


def test_only_target_and_end_carry_labels() -> None:
    batch = make_batch(PAIRS, tokenizer=TOKENIZER)
    three = TOKENIZER.encode("3")[0]
    assert batch.labels_BT.tolist() == [
        [IGNORED] * 4 + [three, END] + [IGNORED] * 5,
        [IGNORED] * 8 + [three, three, END],
    ]
    assert batch.mask_BT.sum(1).tolist() == [6, 11]
    assert batch.ids_BT[0, 6:].tolist() == [TOKENIZER.pad_token_id] * 5


def test_loss_is_the_mean_over_labelled_tokens_each_sequence_read_alone() -> None:
    model = build_model(TINY, tokenizer=TOKENIZER, seed=0)
    logprobs = []
    for pair in PAIRS:
        prompt, target = TOKENIZER.encode(pair.prompt), [*TOKENIZER.encode(pair.target), END]
        logits = model(input_ids=torch.tensor([prompt + target])).logits[0]
        logprobs += [log_softmax(logits[len(prompt) + i - 1], -1)[token].item() for i, token in enumerate(target)]
    loss = imitation_loss(model, make_batch(PAIRS, tokenizer=TOKENIZER)).item()
    assert loss == pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-5)


def test_schedule_rises_then_falls_to_zero() -> None:
    shares = [schedule(step, steps=100) for step in range(100)]
    assert shares[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert shares[5] == 1.0
    assert shares[5:] == sorted(shares[5:], reverse=True)
    assert 0 < shares[-1] < 0.01
    assert schedule(0, steps=1) == 1.0


def test_it_learns_and_tells_every_step() -> None:
    model = build_model(TINY, tokenizer=TOKENIZER, seed=0)
    spec = WarmUp.model_validate({"steps": 40, "batchSize": 2, "learningRate": 2e-2})
    seen = list(warm_up(model, tokenizer=TOKENIZER, pairs=itertools.cycle(PAIRS), spec=spec))
    assert [progress.step for progress in seen] == list(range(1, 41))
    assert seen[-1].loss < 0.2 * seen[0].loss
    assert not model.training


def test_a_data_set_that_ends_early_is_the_users_error() -> None:
    model = build_model(TINY, tokenizer=TOKENIZER, seed=0)
    spec = WarmUp.model_validate({"steps": 2, "batchSize": 2})
    with pytest.raises(UserError, match="ended at step 1"):
        list(warm_up(model, tokenizer=TOKENIZER, pairs=PAIRS, spec=spec))
