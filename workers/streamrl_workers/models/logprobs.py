"""Log-probs and entropies of given tokens, by chunks: the logits of all tokens are never there at once.

Owns: what a causal language model does behind its hidden states, forward and backward. Does not own: which tokens (`forward.py`).
Legend: as in `forward.py`; C tokens of a chunk.

The forward pass keeps hidden states only. The backward pass forms the logits of each chunk again. With p = softmax(z / T) and g the
gradient of a token's log-prob, that of its logits z is g (onehot - p) / T. The gradient of the head is summed over the chunks in
float32, also where the weights of the pass are bfloat16, and rounded once.

All of it happens within the model's own `forward`: FSDP2 gathers the head around it, in both directions. A rank without a token
passes through the same and gives gradients of zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from streamrl.errors import UserError
from streamrl.keys import ENV_MODEL_PATH
from streamrl.memory import chunk_logits
from streamrl_workers.models.documents import Documents
from streamrl_workers.models.free_memory import total_bytes
from streamrl_workers.models.rope import own_positions


def answer_logprobs(model: PreTrainedModel) -> None:
    """In place: from now on the model's forward takes tokens, and gives log-probs [N] and entropies [N], these without gradient."""
    decoder, whole = model.get_decoder(), model.forward  # type: ignore[no-untyped-call] # transformers'
    if decoder is model or _head_of(model) is None:
        raise UserError(
            field=ENV_MODEL_PATH, rule="must be of a decoder with a head of its own", got=type(model).__name__
        )
    vocabulary = model.config.get_text_config().vocab_size

    def forward(
        inputs_BL: torch.Tensor,
        *,
        rows_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float,
        entropy: bool,
        positions_BL: torch.Tensor | None = None,
        documents: Documents | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        answer = decoder(input_ids=inputs_BL, use_cache=False, **own_positions(positions_BL, documents))

        def head(hidden_CH: torch.Tensor) -> torch.Tensor:
            """As the model itself does it: its own forward, in which the decoder answers with these states."""
            with _answering(decoder, type(answer)(last_hidden_state=hidden_CH.unsqueeze(0))):
                logits: torch.Tensor = whole(use_cache=False).logits
            return logits.squeeze(0)

        def read(rows_N: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Of the states that are here."""
            hidden_NH = answer.last_hidden_state.flatten(0, 1).index_select(0, rows_N)
            rows = max(1, chunk_logits(total_bytes(hidden_NH.device)) // vocabulary)
            weights = partial(_trained, model, decoder)
            one_pass = _Pass(head=head, weights=weights, rows=rows, temperature=temperature, entropy=entropy)
            found: tuple[torch.Tensor, torch.Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call] # torch's
                one_pass, targets_N, hidden_NH, *one_pass.weights()
            )
            return found

        share = None if documents is None else documents.share
        if share is None:
            return read(rows_N, targets_N)
        own_n, rows_n = share.find(rows_N)
        found = torch.stack(read(rows_n, targets_N[own_n]), dim=1)
        logprobs_N, entropies_N = share.join(found, own_n, count=len(rows_N)).unbind(1)
        return logprobs_N.clone(), entropies_N.detach().clone()  # FSDP hooks no views

    model.forward = forward


@contextmanager
def _answering(decoder: torch.nn.Module, answer: Any) -> Iterator[None]:  # noqa: ANN401 - each model has its own class
    """While the context lasts the decoder computes nothing."""
    replaced = decoder.forward
    decoder.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        decoder.forward = replaced


def _head_of(model: PreTrainedModel) -> torch.nn.Module | None:
    found: torch.nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call] # transformers'
    return found


def _trained(model: PreTrainedModel, decoder: torch.nn.Module) -> list[torch.nn.Parameter]:
    """What the head may give gradients to: tied or not, adapters too. With FSDP2 these are the gathered tensors of the moment."""
    head = _head_of(model)
    assert head is not None, "a model that was refused"
    inner = {id(p) for p in decoder.parameters()} - {id(p) for p in head.parameters()}
    return [p for p in model.parameters() if p.requires_grad and id(p) not in inner]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One forward pass without its tensors."""

    head: Callable[[torch.Tensor], torch.Tensor]  # hidden states [C, H] to logits [C, V]
    weights: Callable[[], list[torch.nn.Parameter]]  # of the head
    rows: int  # tokens of a chunk
    temperature: float
    entropy: bool  # whether entropies are asked for; else they are 0

    def chunks(self, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The same rows of each."""
        return zip(*(torch.split(tensor, self.rows) for tensor in tensors), strict=True)

    def scaled(self, logits_CV: torch.Tensor) -> torch.Tensor:
        """What the softmax is taken of."""
        return logits_CV.float() / self.temperature


class _TokenLogprobs(torch.autograd.Function):
    """Log-probs with gradient, entropies without."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch gives it any attribute
        one_pass: _Pass,
        targets_N: torch.Tensor,
        hidden_NH: torch.Tensor,
        *weights: torch.nn.Parameter,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del weights  # named for autograd; the head reaches them by itself
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        entropies_N = torch.zeros_like(logprobs_N)
        ctx.one_pass = one_pass
        ctx.save_for_backward(targets_N, hidden_NH)
        ctx.mark_non_differentiable(entropies_N)
        for hidden_CH, targets_C, logprobs_C, entropies_C in one_pass.chunks(
            hidden_NH, targets_N, logprobs_N, entropies_N
        ):
            scaled_CV = one_pass.scaled(one_pass.head(hidden_CH))
            normaliser_C = scaled_CV.logsumexp(-1)
            logprobs_C.copy_(scaled_CV.gather(1, targets_C.unsqueeze(1)).squeeze(1) - normaliser_C)
            if one_pass.entropy:
                entropies_C.copy_(normaliser_C - torch.softmax(scaled_CV, -1).mul_(scaled_CV).sum(-1))
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_N: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401 - as above
        one_pass: _Pass = ctx.one_pass
        targets_N, hidden_NH = ctx.saved_tensors
        weights = one_pass.weights()
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        into_NH = torch.zeros_like(hidden_NH)
        for hidden_CH, targets_C, gradient_C, into_CH in one_pass.chunks(hidden_NH, targets_N, gradient_N, into_NH):
            with torch.enable_grad():
                leaf_CH = hidden_CH.detach().requires_grad_()
                logits_CV = one_pass.head(leaf_CH)
            scale_C1 = (gradient_C / one_pass.temperature).unsqueeze(1)
            down_CV = torch.softmax(one_pass.scaled(logits_CV.detach()), -1).mul_(-scale_C1)
            down_CV.scatter_add_(1, targets_C.unsqueeze(1), scale_C1)
            into, *found = torch.autograd.grad(logits_CV, (leaf_CH, *weights), down_CV.to(logits_CV.dtype))
            into_CH.copy_(into)
            for total, part in zip(sums, found, strict=True):
                total.add_(part)
        rounded = (total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True))
        return None, None, into_NH if ctx.needs_input_grad[2] else None, *rounded
