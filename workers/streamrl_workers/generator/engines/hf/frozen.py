"""The engine `hf` of a frozen pool: says the log-probs of finished samples. It generates nothing, and no weights come.

Owns which samples go into one forward pass. Does not own logits (`models/logprobs.py`, as in the trainer, whose numbers these are to be), nor
where the model lies (`models/frozen.py`).

A step takes samples until their tokens fill a pass, the longest of them together. Padding is on the right and needs no mask: in a
causal model nothing behind a token can change it. Nothing is kept between two steps.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import HfEngineSpec as HfSpec
from streamrl_workers.generator.engines.base import Delta, EngineOptions, KvLoad, LoadPart
from streamrl_workers.models.load import load_model
from streamrl_workers.models.logprobs import answer_logprobs
from streamrl_workers.models.rope import rope_switch, row_positions, split_at_switch
from streamrl_workers.stream.packing import count_32, unpack_int32
from streamrl_workers.stream.segments import trained_contexts
from streamrl_workers.weights.hashing import TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """A context of a sample."""

    lease: int
    inputs: "array[int]"  # all tokens but the last
    places: list[int]  # of the tokens that are asked about, among inputs and the last
    targets: list[int]  # those tokens
    begin: int  # where the context begins among the sample's completion; below 0: with the prompt


class FrozenEngine:
    """Log-probs by a model that never changes."""

    version: int | None = 0

    def __init__(self, model: PreTrainedModel, *, slots: int, pass_tokens: int, precision: str = "FP32") -> None:
        """The model becomes the engine's own. `pass_tokens`: of one forward pass; a longer sample is a pass of its own."""
        self.slots = slots
        self.load_parts: Mapping[LoadPart, float] = {}
        self._vocabulary = model.config.get_text_config().vocab_size
        self._positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._device = model.device
        self._pass_tokens = pass_tokens
        self._bfloat16 = precision == "BF16"
        answer_logprobs(model.eval().requires_grad_(requires_grad=False))  # type: ignore[no-untyped-call] # transformers'
        self._model = model
        self._switch = rope_switch(model.config)
        self._held: dict[int, pb.SampleRequest] = {}

    def active(self) -> int:
        return len(self._held)

    def pinned_active(self) -> int:
        return 0

    def free(self) -> int:
        return self.slots - len(self._held)

    def pause(self, *, paused: bool) -> None:
        del paused

    def step_seconds(self) -> float:
        return 0.0

    def kv_load(self) -> KvLoad | None:
        return None

    def metrics(self) -> bytes:
        return b""

    def close(self) -> None:
        pass

    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        raise AssertionError(f"weights of version {version} for a frozen model")

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        raise AssertionError(f"{len(sequences)} sequences to prove a load for a frozen model")

    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        assert len(requests) <= self.free(), "more requests than free slots"
        refused = []
        for request in requests:
            if fault := self._fault(request):
                refused.append(Delta(lease=request.lease, tokens=(), logprobs=(), version=0, finish_reason="error", error=fault))  # fmt: skip
            else:
                self._held[request.lease] = request
        return refused

    def cancel(self, leases: Collection[int]) -> None:
        for lease in leases:
            self._held.pop(lease, None)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        taken: list[pb.SampleRequest] = []
        tokens = 0
        for request in self._held.values():  # oldest first
            taken.append(request)
            tokens += _tokens(request.finished)
            if tokens >= self._pass_tokens:
                break
        found = {request.lease: array("f", bytes(len(request.finished.tokens))) for request in taken}
        for batch in _passes(
            [one for request in taken for one in _sequences(request, switch=self._switch)], tokens=self._pass_tokens
        ):
            numbers = iter(self._logprobs(batch, temperature=taken[0].sampling.temperature))
            for one in batch:
                for place in one.places:
                    found[one.lease][one.begin + place] = next(numbers)
        self.cancel(found)
        return [
            Delta(lease=lease, tokens=(), logprobs=tuple(numbers), version=0, finish_reason="stop")
            for lease, numbers in found.items()
        ]

    def _logprobs(self, batch: Sequence[_Sequence], *, temperature: float) -> list[float]:
        length = max(len(one.inputs) for one in batch)
        inputs_BL = torch.zeros(len(batch), length, dtype=torch.int64)
        for row, one in enumerate(batch):
            inputs_BL[row, : len(one.inputs)] = torch.tensor(one.inputs)
        rows = [row * length + place - 1 for row, one in enumerate(batch) for place in one.places]
        targets = [token for one in batch for token in one.targets]
        with torch.autocast(self._device.type, dtype=torch.bfloat16) if self._bfloat16 else nullcontext():
            logprobs_N, _ = self._model(
                inputs_BL.to(self._device),
                positions_BL=None
                if self._switch is None
                else row_positions([len(one.inputs) for one in batch], width=length).to(self._device),
                rows_N=torch.tensor(rows, device=self._device),
                targets_N=torch.tensor(targets, device=self._device),
                temperature=temperature,
                entropy=False,
            )
        numbers: list[float] = logprobs_N.tolist()
        return numbers

    def _fault(self, request: pb.SampleRequest) -> str:
        if not request.HasField("finished"):
            return "a frozen model generates nothing"
        tokens = [*unpack_int32(request.finished.prompt_tokens), *unpack_int32(request.finished.tokens)]
        if max(tokens, default=0) >= self._vocabulary:
            return f"token {max(tokens)}, the frozen model knows {self._vocabulary}"
        longest = max((len(one.inputs) for one in _sequences(request)), default=0)
        if self._positions is not None and longest > self._positions:
            return f"{longest} tokens, the frozen model has {self._positions} positions"
        return ""


def create(options: EngineOptions, *, pass_tokens: int) -> FrozenEngine:
    """The engine with the weights of the folder `options.model_path`, on the GPU where there is one."""
    assert options.model_path is not None and isinstance(options.spec, HfSpec)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = load_model(options.model_path).to("cuda" if torch.cuda.is_available() else "cpu")  # type: ignore[arg-type] # transformers'
    pass_tokens = 1 if options.spec.batch_invariant else pass_tokens  # each sequence alone
    return FrozenEngine(model, slots=options.spec.slots, pass_tokens=pass_tokens, precision=options.precision)


def _tokens(sample: pb.Sample) -> int:
    return count_32(sample.prompt_tokens) + count_32(sample.tokens)


def _sequences(request: pb.SampleRequest, *, switch: int | None = None) -> list[_Sequence]:
    sample = request.finished
    prompt = unpack_int32(sample.prompt_tokens)
    whole = prompt + unpack_int32(sample.tokens)
    return [
        _Sequence(
            lease=request.lease,
            inputs=whole[begin : begin + places[-1]],
            places=places,
            targets=[whole[begin + place] for place in places],
            begin=begin - len(prompt),
        )
        for begin, trained in trained_contexts(sample)
        for places in split_at_switch([place - begin for place in trained], switch)
        if places
    ]


def _passes(sequences: Sequence[_Sequence], *, tokens: int) -> list[list[_Sequence]]:
    """Batches of alike lengths, longest first, each within so many padded tokens; what is longer goes alone."""
    passes: list[list[_Sequence]] = []
    for one in sorted(sequences, key=lambda sequence: -len(sequence.inputs)):
        if passes and len(passes[-1][0].inputs) * (len(passes[-1]) + 1) <= tokens:
            passes[-1].append(one)
        else:
            passes.append([one])
    return passes
