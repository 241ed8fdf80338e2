"""The engine `hf`: admits requests into slots, steps them all, takes new weights between steps; and how it is built.

Owns which request has a slot. Does not own the forwards (`runner.py`), the numbers of a row (`batch_state.py`), what tokens
mean for a request (`requests.py`), bytes of weights (`parameters.py`). One step is:

    rows' last tokens -> runner.decode -> logits -> draw_tokens -> deltas; finished rows are freed

Invariants: those of `Engine`. After `load_weights` the keys and values of all active sequences are computed
anew, so that a log-prob is what a plain forward of the named version gives (invariant 3).
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.base import Delta, EngineOptions, KvLoad
from streamrl_workers.generator.engines.hf.batch_state import BatchState, draw_tokens
from streamrl_workers.generator.engines.hf.kv_cache import swaps
from streamrl_workers.generator.engines.hf.parameters import Parameters
from streamrl_workers.generator.engines.hf.runner import Prefill, Runner, check_numerics, check_supported
from streamrl_workers.generator.engines.requests import ActiveSequence, Requests, end_ids, limit_tokens
from streamrl_workers.models.load import DTYPES, load_model, load_structure, load_tokenizer
from streamrl_workers.weights.hashing import TensorBytes


class HfEngine:
    """Continuous batching over a transformers causal LM."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        slots: int,
        add_special_tokens: bool = True,
    ) -> None:
        """The model becomes the engine's own; its weights come by `load_weights`. Raises ValueError for one that is not supported."""
        check_supported(model)
        self.slots = slots
        self.version: int | None = None
        limit = limit_tokens(model.config)
        vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        with torch.inference_mode():
            self._runner = Runner(model=model, slots=slots, limit_tokens=limit)
        self._parameters = Parameters(model)
        self._batch = BatchState(slots=slots, vocabulary=vocabulary, device=self._runner.device)
        self._prefill = Prefill(self._runner)
        self._requests = Requests(
            tokenizer=tokenizer,
            end_ids=end_ids(model.generation_config, tokenizer),
            limit_tokens=limit,
            vocabulary=vocabulary,
            add_special_tokens=add_special_tokens,
        )

    def active(self) -> int:
        return len(self._batch)

    def pinned_active(self) -> int:
        return sum(seq.request.pinned for seq in self._batch.sequences)

    def free(self) -> int:
        return self.slots - len(self._batch)

    def step_seconds(self) -> float:
        return 0.0

    def kv_load(self) -> KvLoad | None:
        return None

    def metrics(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        self._parameters.load(tensors)
        self._prefill.forget()
        if self.version is None:
            check_numerics(self._runner)
        self.version = version
        self._prefill.fill(self._batch.sequences, first_row=0)
        return []

    @torch.inference_mode()
    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        assert self.version is not None, "requests were added before weights"
        assert len(requests) <= self.free(), "more requests than free slots"
        results = [self._requests.admit(request, version=self.version) for request in requests]
        admitted = [result for result in results if isinstance(result, ActiveSequence)]
        if admitted:
            self._prefill.fill(admitted, first_row=len(self._batch))
            self._batch.append(admitted)
        return [result for result in results if isinstance(result, Delta)]

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        if not self._batch:
            return []
        lengths = self._arranged()
        logits_bv = self._runner.decode(self._batch.tokens, positions=self._batch.positions, lengths=lengths)
        tokens_b, logprobs_b = draw_tokens(logits_bv, self._batch.draw())
        self._batch.advance(tokens_b)
        sequences = self._batch.sequences
        assert self.version is not None
        deltas = [
            self._requests.extend(seq, tokens=(token,), logprobs=(logprob,), version=self.version)
            for seq, token, logprob in zip(sequences, tokens_b.tolist(), logprobs_b.tolist(), strict=True)
        ]
        self._free_rows([row for row, delta in enumerate(deltas) if delta.finish_reason is not None])
        return deltas

    @torch.inference_mode()
    def cancel(self, leases: Collection[int]) -> None:
        wanted = set(leases)
        self._free_rows([row for row, seq in enumerate(self._batch.sequences) if seq.request.lease in wanted])

    def _arranged(self) -> list[int]:
        """Lengths of the rows, the longest classes first (`kv_cache.py`)."""
        lengths = self._batch.lengths()
        for row, other in swaps(lengths):
            self._runner.cache.swap(row, other, tokens=max(lengths[row], lengths[other]) - 1)
            self._batch.swap(row, other)
            lengths[row], lengths[other] = lengths[other], lengths[row]
        return lengths

    def _free_rows(self, rows: Sequence[int]) -> None:
        """Rows at the end that stay move into the places that become free before them, all at once."""
        stay = len(self._batch) - len(rows)
        freed = set(rows)
        targets = sorted(row for row in freed if row < stay)
        sources = [row for row in range(stay, len(self._batch)) if row not in freed]
        if sources:
            lengths = self._batch.lengths()
            self._runner.cache.move(
                sources=sources, targets=targets, tokens=max(lengths[source] for source in sources) - 1
            )
            self._batch.move(sources=sources, targets=targets)
        self._batch.cut(len(rows))


def create(options: EngineOptions) -> HfEngine:
    """The engine, without weights: they come by `load_weights`."""
    assert options.model_path is not None
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_structure(options.model_path, dtype=DTYPES[options.precision])
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type] # transformers types it away
    return HfEngine(
        model=model,
        tokenizer=load_tokenizer(options.model_path),
        slots=options.spec.slots,
        add_special_tokens=options.add_special_tokens,
    )


MOST_SLOTS = 64
"""More prompts than this take turns."""
_SEEDS = 1 << 64


def complete(
    prompts: Sequence[str], *, model_path: str, sampling: pb.Sampling, seed: int, add_special_tokens: bool = True
) -> list[str]:
    """Completion of each prompt, in their order. `add_special_tokens`: to prompts, as the tokenizer does.

    Raises:
        UserError: the model cannot be loaded, or a prompt does not fit it.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call] # untyped in transformers
    model = load_model(model_path)
    weights = Parameters(model).snapshot()
    engine = HfEngine(
        model=model,
        tokenizer=load_tokenizer(model_path),
        slots=min(MOST_SLOTS, len(prompts)),
        add_special_tokens=add_special_tokens,
    )
    engine.load_weights(version=0, tensors=weights)
    waiting = [
        pb.SampleRequest(lease=i, group_id=i, prompt=p, sampling=sampling, seed=(seed + i) % _SEEDS)
        for i, p in enumerate(prompts)
    ]
    texts: dict[int, str] = {}
    while len(texts) < len(prompts):
        admitted, waiting = waiting[: engine.free()], waiting[engine.free() :]
        for delta in [*engine.add(admitted), *engine.step()]:
            if delta.finish_reason is not None:
                texts[delta.lease] = delta.text or "" if delta.error is None else f" [{delta.error}]"
    return [texts[i] for i in range(len(prompts))]
