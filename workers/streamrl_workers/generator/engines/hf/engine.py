"""The engine `hf`: admits requests into slots, steps them all, takes new weights between steps.

Owns: the life of a request from admission to its last delta. Does not own: the forwards (runner), the
numbers of a row (sequences), ends (stopping), bytes of weights (parameters). One step is:

    rows' last tokens -> runner.decode -> logits -> draw_tokens -> deltas; finished rows are freed

Invariants: those of `Engine`. After `load_weights` the keys and values of all active sequences are computed
anew, so that a log-prob is what a plain forward of the named version gives (invariant 3).
"""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from streamrl_workers.generator.engine import Delta, FinishReason, Request, TensorBytes, TensorSpec
from streamrl_workers.generator.engines.hf.filling import Filling
from streamrl_workers.generator.engines.hf.parameters import Parameters
from streamrl_workers.generator.engines.hf.prompts import PromptTokens
from streamrl_workers.generator.engines.hf.runner import Runner
from streamrl_workers.generator.engines.hf.sequences import ActiveSequence, Rows
from streamrl_workers.generator.engines.hf.stopping import Stopping
from streamrl_workers.generator.engines.hf.support import check_numerics
from streamrl_workers.generator.engines.hf.zones import swaps
from streamrl_workers.generator.sampling import draw_tokens
from streamrl_workers.weights.hashing import tensors_hash


class HfEngine:
    """Continuous batching over a transformers causal LM."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        limit_tokens: int,
        end_ids: frozenset[int],
        add_special_tokens: bool = True,
    ) -> None:
        self.slots = slots
        self.version: int | None = None
        self._limit_tokens = limit_tokens
        self._vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        with torch.inference_mode():
            self._runner = Runner(model=model, slots=slots, limit_tokens=limit_tokens)
        self._parameters = Parameters(model)
        self._rows = Rows(slots=slots, vocabulary=self._vocabulary, device=self._runner.device)
        self._prompts = PromptTokens(tokenizer, add_special_tokens=add_special_tokens)
        self._filling = Filling(self._runner)
        self._stopping = Stopping(tokenizer=tokenizer, end_ids=end_ids)

    def active(self) -> int:
        return len(self._rows)

    def pinned_active(self) -> int:
        return sum(seq.request.pinned for seq in self._rows.sequences)

    def free(self) -> int:
        return self.slots - len(self._rows)

    def step_seconds(self) -> float:
        return 0.0

    def tensor_specs(self) -> Mapping[str, TensorSpec]:
        return self._parameters.specs()

    def weights_hash(self) -> str:
        assert self.version is not None, "no weights are loaded"
        return tensors_hash(self._parameters.loaded()).hex()

    @torch.inference_mode()
    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> None:
        self._parameters.load(tensors)
        self._filling.forget()
        if self.version is None:
            check_numerics(self._runner)
        self.version = version
        self._filling.fill(self._rows.sequences, first_row=0)

    @torch.inference_mode()
    def add(self, requests: Sequence[Request]) -> list[Delta]:
        assert self.version is not None, "requests were added before weights"
        assert len(requests) <= self.free(), "more requests than free slots"
        results = [self._admit(request) for request in requests]
        admitted = [result for result in results if isinstance(result, ActiveSequence)]
        if admitted:
            self._filling.fill(admitted, first_row=len(self._rows))
            self._rows.append(admitted)
        return [result for result in results if isinstance(result, Delta)]

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        if not self._rows:
            return []
        lengths = self._arranged()
        logits_bv = self._runner.decode(self._rows.tokens, positions=self._rows.positions, lengths=lengths)
        tokens_b, logprobs_b = draw_tokens(logits_bv, self._rows.draw())
        self._rows.advance(tokens_b)
        sequences = self._rows.sequences
        deltas = [self._extend(*row) for row in zip(sequences, tokens_b.tolist(), logprobs_b.tolist(), strict=True)]
        self._free_rows([row for row, delta in enumerate(deltas) if delta.finish_reason is not None])
        return deltas

    @torch.inference_mode()
    def cancel(self, request_ids: Collection[int]) -> None:
        wanted = set(request_ids)
        self._free_rows([row for row, seq in enumerate(self._rows.sequences) if seq.request.request_id in wanted])

    def _admit(self, request: Request) -> ActiveSequence | Delta:
        """A sequence to put into a slot, or the last delta of a request that needs none."""
        what = "prompt"
        try:
            prompt = self._prompts.of(request.prompt)
            what = "observation"
            observed = self._prompts.behind(request.observation)
        except Exception as error:  # noqa: BLE001 - the tokenizers' Rust raises a bare one, as for a character that it does not know
            seq = ActiveSequence(request=request, prompt=(), completion=[], limit=0)
            return self._delta(seq, reason="error", error=f"the {what} cannot be tokenized: {error}")
        context = request.context_tokens + len(observed)
        seq = ActiveSequence(
            request=request,
            prompt=prompt,
            completion=[*request.prefix_tokens, *observed],
            limit=min(context + request.sampling.max_tokens, self._limit_tokens - len(prompt)),
            context=context,
            observed=observed,
        )
        refusal = self._refusal(seq)
        if refusal is not None:
            return self._delta(seq, reason="error", error=refusal)
        if context and seq.limit <= context:  # earlier turns have taken all positions
            return self._delta(seq, reason="length")
        reason = self._stopping.reason(seq) if seq.turn else None
        return seq if reason is None else self._delta(seq, reason=reason)

    def _refusal(self, seq: ActiveSequence) -> str | None:
        """Why a sequence cannot be generated."""
        if not seq.prompt:
            return "the prompt has no tokens"
        if seq.limit <= 0:
            return f"the prompt has {len(seq.prompt)} tokens; prompt and completion have room for {self._limit_tokens}"
        strange = [token for token in seq.tokens if not 0 <= token < self._vocabulary]
        if strange:
            return f"token {strange[0]} is not in the model's vocabulary of {self._vocabulary}"
        return None

    def _extend(self, seq: ActiveSequence, token: int, logprob: float) -> Delta:
        if not math.isfinite(logprob):
            error = f"the model gave a log-prob of {logprob} under weights of version {self.version}"
            return self._delta(seq, reason="error", error=error)
        seq.completion.append(token)
        return self._delta(seq, tokens=(token,), logprobs=(logprob,), reason=self._stopping.reason(seq))

    def _delta(
        self,
        seq: ActiveSequence,
        *,
        reason: FinishReason | None,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        error: str | None = None,
    ) -> Delta:
        assert self.version is not None
        prompt_tokens = None if seq.reported else seq.prompt
        observation_tokens = seq.observed if tokens and not seq.reported else ()
        seq.reported = True
        return Delta(
            request_id=seq.request.request_id,
            tokens=tokens,
            logprobs=logprobs,
            version=self.version,
            finish_reason=reason,
            text=None if reason is None else self._stopping.text(seq),
            prompt_tokens=prompt_tokens,
            error=error,
            observation_tokens=observation_tokens,
        )

    def _arranged(self) -> list[int]:
        """Lengths of the rows, the longest classes first (`zones.py`)."""
        lengths = self._rows.lengths()
        for row, other in swaps(lengths):
            self._runner.cache.swap(row, other, tokens=max(lengths[row], lengths[other]) - 1)
            self._rows.swap(row, other)
            lengths[row], lengths[other] = lengths[other], lengths[row]
        return lengths

    def _free_rows(self, rows: Sequence[int]) -> None:
        """Rows at the end that stay move into the places that become free before them, all at once."""
        stay = len(self._rows) - len(rows)
        freed = set(rows)
        targets = sorted(row for row in freed if row < stay)
        sources = [row for row in range(stay, len(self._rows)) if row not in freed]
        if sources:
            lengths = self._rows.lengths()
            self._runner.cache.move(
                sources=sources, targets=targets, tokens=max(lengths[source] for source in sources) - 1
            )
            self._rows.move(sources=sources, targets=targets)
        self._rows.cut(len(rows))
