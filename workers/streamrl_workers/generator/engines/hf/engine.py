"""The engine `hf`: admits requests into slots, steps them all, takes new weights between steps; and how it is built.

Owns which request has a slot, and which of them have a row in the cache. Does not own the forwards (`runner.py`), the numbers of a
row (`batch_state.py`), what tokens mean for a request (`requests.py`), bytes of weights (`parameters.py`). One step is:

    rows' last tokens -> runner.decode -> logits -> draw_tokens -> deltas; finished rows are freed

Rows times longest stay within the memory for keys and values. Where they do not, the youngest rest: they keep their slot, and are
computed anew from their tokens when there is room. So memory costs time, never a sample.

Invariants: those of `Engine`. After `load_weights` the keys and values of all active sequences are computed
anew, so that a log-prob is what a plain forward of the named version gives (invariant 3).
"""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from streamrl.errors import UserError
from streamrl.proto import stream_pb2 as pb
from streamrl.spec.base import parse_bytes
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.answer_ends import end_tokens
from streamrl_workers.generator.engines.base import Delta, EngineOptions, KvLoad, LoadPart
from streamrl_workers.generator.engines.hf.adapters import AdaptedParameters
from streamrl_workers.generator.engines.hf.batch_state import BatchState, draw_tokens
from streamrl_workers.generator.engines.hf.invariant import InvariantRunner, check_rows_apart
from streamrl_workers.generator.engines.hf.kv_cache import swaps
from streamrl_workers.generator.engines.hf.runner import Prefill, Runner, check_supported, longest_row
from streamrl_workers.generator.engines.requests import ActiveSequence, Requests
from streamrl_workers.models.free_memory import free_bytes
from streamrl_workers.models.load import DTYPES, load_model, load_structure, load_tokenizer
from streamrl_workers.models.published import Parameters
from streamrl_workers.models.side_path import add_side_path
from streamrl_workers.weights.hashing import TensorBytes


class HfEngine:
    """Continuous batching over a transformers causal LM."""

    def __init__(  # noqa: PLR0913 - what the job and its model say
        self,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: frozenset[int],
        slots: int,
        add_special_tokens: bool = True,
        kv_bytes: int | None = None,
        sample_tokens: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """The model becomes the engine's own; its weights come by `load_weights`. Raises ValueError for one that is not supported.

        `end_ids`: tokens at which a completion ends (`answer_ends.py`).
        `kv_bytes`: of keys and values at most; None: half of the memory that is free now.
        `sample_tokens`: of the longest sample, for which the memory is counted in tokens; None: the model's limit.
        `batch_invariant`: tokens and log-probs are the same bits in every batch (`invariant.py`).
        """
        check_supported(model)
        if batch_invariant:
            check_rows_apart(model)
        self.slots = slots
        self.version: int | None = None
        self.load_parts: Mapping[LoadPart, float] = {}
        limit = longest_row(model.config)
        vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]
        with torch.inference_mode():
            kv_bytes = free_bytes(model.device) // _FREE_SHARE if kv_bytes is None else kv_bytes
            runner = InvariantRunner if batch_invariant else Runner
            self._runner = runner(model=model, slots=slots, limit_tokens=limit, kv_bytes=kv_bytes)
        self._parameters = AdaptedParameters(model)
        self._batch = BatchState(slots=slots, vocabulary=vocabulary, device=self._runner.device)
        self._prefill = Prefill(self._runner)
        self._resting: list[ActiveSequence] = []  # oldest first
        self._longest = 0  # of the rows, at the last look
        self._sample_tokens = limit if sample_tokens is None else min(limit, sample_tokens)
        self._requests = Requests(
            tokenizer=tokenizer,
            end_ids=end_ids,
            limit_tokens=limit,
            vocabulary=vocabulary,
            add_special_tokens=add_special_tokens,
            capacity_tokens=self._runner.cache.longest(rows=1),
        )

    def active(self) -> int:
        return len(self._batch) + len(self._resting)

    def pinned_active(self) -> int:
        return sum(seq.request.pinned for seq in [*self._batch.sequences, *self._resting])

    def free(self) -> int:
        return 0 if self._resting else self.slots - len(self._batch)

    def pause(self, *, paused: bool) -> None:
        del paused

    def step_seconds(self) -> float:
        return 0.0

    def kv_load(self) -> KvLoad:
        """Of a rectangle: all rows take as much as the longest."""
        return self._runner.cache.load(rows=len(self._batch), tokens=self._longest, sample_tokens=self._sample_tokens)

    def metrics(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    @torch.inference_mode()
    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        begun_s = time.monotonic()
        self._parameters.load(tensors)
        self._prefill.forget()
        if self.version is None:
            self._runner.check()
        self.version = version
        # Not by replay: the bits of what goes on follow from this moment anyway, and a long sample would never end.
        loaded_s = time.monotonic()
        self._prefill.fill(self._batch.sequences, first_row=0, replay=False)
        self._batch.restart()
        self.load_parts = {"load": loaded_s - begun_s, "cache": time.monotonic() - loaded_s}
        return []

    @torch.inference_mode()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        assert not self.active(), "rows are in use"
        together = self._runner.cache.fits(rows=len(sequences), tokens=max(map(len, sequences)))
        if together and len(sequences) <= self.slots:
            found = self._runner.score(sequences)
        else:  # one after the other, those that fit
            fits = [self._runner.cache.fits(rows=1, tokens=len(tokens)) for tokens in sequences]
            found = [self._runner.score([t])[0] if fit else [] for t, fit in zip(sequences, fits, strict=True)]
        self._prefill.forget()
        return found

    @torch.inference_mode()
    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        assert self.version is not None, "requests were added before weights"
        assert len(requests) <= self.free(), "more requests than free slots"
        results = [self._requests.admit(request, version=self.version) for request in requests]
        admitted = [result for result in results if isinstance(result, ActiveSequence)]
        self._resting += sorted(admitted, key=_age)
        self._take_in()
        return [result for result in results if isinstance(result, Delta)]

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        self._make_room()
        self._take_in()
        if not self._batch:
            return []
        lengths = self._arranged()
        self._cross_switch(lengths)
        logits_bv = self._runner.decode(self._batch.tokens, positions=self._batch.positions, lengths=lengths)
        tokens_b, logprobs_b = draw_tokens(logits_bv, self._batch.draw())
        rows = self._batch.advance(tokens_b)
        sequences, tokens, logprobs = self._batch.sequences, tokens_b.tolist(), logprobs_b.tolist()
        assert self.version is not None
        deltas = [
            self._requests.extend(
                sequences[row], tokens=(tokens[row],), logprobs=(logprobs[row],), version=self.version
            )
            for row in rows
        ]
        self._free_rows([row for row, delta in zip(rows, deltas, strict=True) if delta.finish_reason is not None])
        return deltas

    @torch.inference_mode()
    def cancel(self, leases: Collection[int]) -> None:
        wanted = set(leases)
        self._resting = [seq for seq in self._resting if seq.request.lease not in wanted]
        self._free_rows([row for row, seq in enumerate(self._batch.sequences) if seq.request.lease in wanted])

    def _take_in(self) -> None:
        """Give rows to the oldest that rest, as long as all fit and can grow a little: else they would soon rest again."""
        rows, longest = len(self._batch), max(self._batch.lengths(), default=0)
        coming = 0
        for seq in self._resting:
            tokens = max(longest, len(seq.prompt) + len(seq.completion))
            if rows + coming and not self._runner.cache.fits(
                rows=rows + coming + 1, tokens=tokens + tokens // _GROWTH + 1
            ):
                break
            coming, longest = coming + 1, tokens
        if coming:
            taken, self._resting = self._resting[:coming], self._resting[coming:]
            self._runner.cache.reserve(rows=rows + coming, tokens=longest)
            self._prefill.fill(taken, first_row=rows, replay=self._runner.replays)
            self._batch.append(taken)
        self._longest = longest

    def _make_room(self) -> None:
        """The youngest rest, as many as must for the others to have one token more."""
        lengths, cache = self._batch.lengths(), self._runner.cache
        if cache.fits(rows=len(lengths), tokens=max(lengths, default=0)):
            return
        rows = sorted(range(len(lengths)), key=lambda row: _age(self._batch.sequences[row]))
        stay = len(rows)
        while stay > 1 and not cache.fits(rows=stay, tokens=max(lengths[row] for row in rows[:stay])):
            stay -= 1
        resting = [self._batch.sequences[row] for row in rows[stay:]]
        self._resting = sorted([*self._resting, *resting], key=_age)
        self._free_rows(rows[stay:])

    def _arranged(self) -> list[int]:
        """Lengths of the rows up to what is fed, the longest classes first (`kv_cache.py`)."""
        lengths = self._batch.fed_lengths()
        for row, other in swaps(lengths):
            self._runner.cache.swap(row, other, tokens=max(lengths[row], lengths[other]))
            self._batch.swap(row, other)
            lengths[row], lengths[other] = lengths[other], lengths[row]
        return lengths

    def _cross_switch(self, lengths: Sequence[int]) -> None:
        """Compute the keys and values of rows again that grow beyond the model's short rotary factors in this step."""
        if self._runner.switch is None:
            return
        for row, length in enumerate(lengths):
            if length == self._runner.switch + 1:
                self._prefill.fill([self._batch.sequences[row]], first_row=row, replay=False)

    def _free_rows(self, rows: Sequence[int]) -> None:
        """Rows at the end that stay move into the places that become free before them, all at once."""
        stay = len(self._batch) - len(rows)
        freed = set(rows)
        targets = sorted(row for row in freed if row < stay)
        sources = [row for row in range(stay, len(self._batch)) if row not in freed]
        if sources:
            lengths = self._batch.lengths()
            self._runner.cache.move(sources=sources, targets=targets, tokens=max(lengths[source] for source in sources))
            self._batch.move(sources=sources, targets=targets)
        self._batch.cut(len(rows))


_FREE_SHARE = 2
"""One in so many bytes of free memory is for keys and values, where the job says nothing: the rest is for forwards and neighbours."""
_GROWTH = 8
"""A sequence of n tokens gets a row again where n + n/8 fit."""


def _age(seq: ActiveSequence) -> int:
    """Leases are numbered in the order in which they were issued."""
    return seq.request.lease


def create(options: EngineOptions) -> HfEngine:
    """The engine, without weights: they come by `load_weights`.

    Raises:
        UserError: keys and values of one sample of maxTokens do not fit.
    """
    spec = options.spec
    assert options.model_path is not None and isinstance(spec, HfSpec)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_structure(options.model_path, dtype=DTYPES[options.precision])
    if options.sherl is not None:
        add_side_path(model, options.sherl)
    model.to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type] # transformers types it away
    tokenizer = load_tokenizer(options.model_path)
    needed = min(longest_row(model.config), options.max_tokens + 1)
    engine = HfEngine(
        model=model,
        tokenizer=tokenizer,
        end_ids=frozenset(end_tokens(Path(options.model_path), tokenizer)),
        slots=spec.slots,
        add_special_tokens=options.add_special_tokens,
        kv_bytes=None if spec.kv_cache_bytes is None else parse_bytes(spec.kv_cache_bytes),
        sample_tokens=needed,
        batch_invariant=spec.batch_invariant,
    )
    capacity = engine.kv_load().capacity_tokens
    if capacity < needed:
        raise UserError(
            field="engine.hf.kvCacheBytes",
            rule=f"must hold one sample of spec.task.sampling.maxTokens with its prompt, at least {needed} tokens",
            got=f"room for {capacity}",
            fix="raise it, or lower maxTokens",
        )
    return engine


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
    tokenizer = load_tokenizer(model_path)
    engine = HfEngine(
        model=model,
        tokenizer=tokenizer,
        end_ids=frozenset(end_tokens(Path(model_path), tokenizer)),
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
