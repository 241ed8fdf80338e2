"""Supervised warm-up: a scratch model imitates the task's own answers before reinforcement learning starts.

Owns what is read (the first items of the training split), the batches, the schedule (linear rise, cosine fall to zero) and
the loss: the mean negative log-likelihood of the target's tokens and of the end token that follows them; the prompt is
read, never imitated. Draws no random number: the order of the pairs is the order of training.

`take_survey` looks at all of it before the first step: its characters become the vocabulary; a digest covers data set,
parameters, seed and the user's format function at once. The data set is read twice rather than held in memory.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from streamrl.errors import UserError
from streamrl.spec.model import WarmUp
from streamrl_workers.answer_ends import written_end
from streamrl_workers.tasks.dataset import MixedDataset

IGNORED = -100
"""Label of a position that is not imitated: what torch's cross entropy leaves out."""

_RISE_SHARE = 0.05
"""Share of the steps in which the learning rate rises."""

_BETAS = (0.9, 0.98)
"""AdamW's memories; the short second one suits a run of some hundred steps."""

_WEIGHT_DECAY = 0.01
_CLIP_NORM = 1.0

_MIN_TRAIN_ITEMS = 4096
"""Items looked at however short the warm-up is: a character that none of them has cannot be written or read later."""

_HELD_OUT_ITEMS = 512
"""Held-out items looked at, for their characters alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpPair:
    """What is read and what is to be said."""

    prompt: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpStep:
    """One finished optimiser step, counted from 1."""

    step: int
    steps: int
    loss: float
    """Mean over the step's imitated tokens, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpBatch:
    """Sequences padded on the right; B sequences of at most T tokens."""

    ids_BT: Tensor
    mask_BT: Tensor
    labels_BT: Tensor
    """The token itself where it is imitated, else `IGNORED`."""


def warm_up(
    model: nn.Module, *, tokenizer: PreTrainedTokenizerFast, pairs: Iterable[WarmUpPair], spec: WarmUp
) -> Iterator[WarmUpStep]:
    """Train `model` in place for `spec.steps` steps; yields after each one. Nothing happens unless it is iterated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
    stream = iter(pairs)
    model.train()
    for step in range(spec.steps):
        chosen = list(itertools.islice(stream, spec.batch_size))
        if len(chosen) < spec.batch_size:
            raise _ran_out(step=step, spec=spec)
        for group in optimizer.param_groups:
            group["lr"] = spec.learning_rate * schedule(step, steps=spec.steps)
        loss = imitation_loss(model, make_batch(chosen, tokenizer=tokenizer))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # untyped in torch
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP_NORM)
        optimizer.step()
        yield WarmUpStep(step=step + 1, steps=spec.steps, loss=loss.item())
    model.eval()


def schedule(step: int, *, steps: int) -> float:
    """Share of the peak learning rate at `step` (from 0): linear to 1, then a half cosine to 0 at `steps`."""
    rise = max(1, round(_RISE_SHARE * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1.0 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def make_batch(pairs: Sequence[WarmUpPair], *, tokenizer: PreTrainedTokenizerFast) -> WarmUpBatch:
    """Prompt, target and end token of each pair; only the latter two carry labels."""
    end = written_end(tokenizer, chat=False)
    prompts = [tokenizer.encode(pair.prompt, add_special_tokens=False) for pair in pairs]
    targets = [[*tokenizer.encode(pair.target, add_special_tokens=False), *end] for pair in pairs]
    longest = max(len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True))
    ids_BT = torch.full((len(pairs), longest), tokenizer.pad_token_id, dtype=torch.long)
    labels_BT = torch.full_like(ids_BT, IGNORED)
    mask_BT = torch.zeros_like(ids_BT)
    for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
        start, stop = len(prompt), len(prompt) + len(target)
        ids_BT[row, :stop] = torch.tensor(prompt + target)
        labels_BT[row, start:stop] = torch.tensor(target)
        mask_BT[row, :stop] = 1
    return WarmUpBatch(ids_BT=ids_BT, mask_BT=mask_BT, labels_BT=labels_BT)


def imitation_loss(model: nn.Module, batch: WarmUpBatch) -> Tensor:
    """Mean negative log-likelihood of the labelled tokens; position t predicts token t + 1."""
    logits_BTV = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, use_cache=False).logits
    return nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1), batch.labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )


def _ran_out(*, step: int, spec: WarmUp) -> UserError:
    return UserError(
        field="spec.model.scratch.warmUp.steps",
        rule=f"needs {spec.steps} steps of {spec.batch_size} examples, and the data set ended at step {step}",
        got=spec.steps,
        fix="lower warmUp.steps or warmUp.batchSize, or give more examples",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was seen."""

    characters: frozenset[str]
    digest: str
    """SHA-256 of the pairs that the warm-up reads, in order."""


def warm_up_pairs(dataset: MixedDataset, *, spec: WarmUp) -> Iterator[WarmUpPair]:
    """The pairs of the warm-up, in order: as many as it reads."""
    return _train_pairs(dataset, count=spec.steps * spec.batch_size)


def take_survey(dataset: MixedDataset, *, spec: WarmUp) -> Survey:
    """Look at all of them. Raises `UserError` if one has no target to imitate."""
    characters: set[str] = set()
    digest = hashlib.sha256()
    for index, pair in enumerate(_train_pairs(dataset, count=max(_MIN_TRAIN_ITEMS, spec.steps * spec.batch_size))):
        if not pair.target and spec.steps > 0:
            raise _no_target(index=index, prompt=pair.prompt)
        characters.update(pair.prompt, pair.target)
        digest.update(f"{len(pair.prompt)},{len(pair.target)}:{pair.prompt}{pair.target}".encode())
    for index in range(min(_HELD_OUT_ITEMS, dataset.held_out_size or _HELD_OUT_ITEMS)):
        item = dataset.item("held_out", index)
        characters.update(item.prompt, item.target)
    return Survey(characters=frozenset(characters), digest=digest.hexdigest())


def _train_pairs(dataset: MixedDataset, *, count: int) -> Iterator[WarmUpPair]:
    for index in range(count):
        item = dataset.item("train", index)
        yield WarmUpPair(prompt=item.prompt, target=item.target)


def _no_target(*, index: int, prompt: str) -> UserError:
    return UserError(
        field="spec.model.scratch.warmUp",
        rule=f"needs a text to imitate for every item, and training item {index} has none",
        got=prompt,
        fix="give spec.task.format a function that returns a target, or set warmUp.steps to 0",
    )
