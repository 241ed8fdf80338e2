"""What every engine is: the `Engine` protocol and the values that cross between the engine loop and an engine.

A request is the message that the scheduler issues (`SampleRequest` of the protocol). Does not own any engine, the link, waiting.
Knows no torch and no connection: so an engine also runs alone (`streamrl generate`).

Invariants that every engine keeps:
- Calls are synchronous and come from one thread; `load_weights` falls between two steps.
- A request's tokens depend on (prompt, prefix, sampling, seed, weights) only, not on its batch mates
  (up to floating-point rounding of the batched arithmetic).
- A delta's log-probs belong to its tokens under the one version it names (invariant 3).
- Every added request ends with exactly one delta that has a finish reason, unless it is cancelled.
- Where context and observation, or the prompt of a sample that has turns, leave no room for a token, that delta has no token and
  the reason "length".
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from streamrl.proto import stream_pb2 as pb
from streamrl.spec.generators import GeneratorEngineSpec
from streamrl.spec.training import Lora, NumberFormat, Sherl
from streamrl_workers.weights.hashing import TensorBytes

FinishReason = Literal["stop", "length", "error"]
LoadPart = Literal["copy", "pause", "load", "cache"]
"""Of `load_weights`: into memory from which the engine loads (it may generate meanwhile); until all requests are held; into the
engine; keys and values of active requests."""


class EngineFailedError(RuntimeError):
    """The engine cannot go on; its process ends, and is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What an engine is made with; each takes of it what it needs."""

    spec: GeneratorEngineSpec  # as the job has it for the pool
    seed: int = 0
    model_path: str | None = None  # folder or hub name with configuration and tokenizer; weights come by `load_weights`
    max_tokens: int = 0  # of a completion at most
    threads: int | None = None  # of torch; None = torch's choice
    add_special_tokens: bool = True  # to prompts, as the tokenizer does; a chat template has put them in
    precision: NumberFormat = "FP32"  # of the weights, as the trainer publishes them
    sherl: Sherl | None = None  # the side path that the trainer's model has
    lora: Lora | None = None  # the adapters that come beside the base; None: none come, or merged into it
    failed: Callable[[str], None] = lambda _: (
        None
    )  # called from any thread when an engine that works by itself cannot go on
    traces_endpoint: str | None = None  # where an engine with traces of its own sends them; None: it makes none
    probe_timeout_s: float = 90.0  # such an engine that answers nothing for so long has failed
    metric_labels: Mapping[str, str] = field(default_factory=dict)  # of this generator, on the engine's own metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLoad:
    """The engine's memory for keys and values, in tokens."""

    capacity_tokens: int
    used_tokens: int  # now
    shares_prompts: bool = False  # samples of a group hold their prompt's once


class Delta(NamedTuple):
    """What one request gained in one step. Of a frozen model: no tokens, and a log-prob for each that its sample has."""

    lease: int  # of the request
    tokens: tuple[int, ...]  # new completion tokens, the end-of-sequence token included
    logprobs: tuple[float, ...]  # one per token, at the sampling temperature, before top-p/top-k
    version: int  # the weights that made these tokens
    finish_reason: FinishReason | None = None  # None while running
    text: str | None = None  # whole completion (prefix included, context not), cut before a stop string; when finished
    prompt_tokens: tuple[int, ...] | None = None  # with the first delta of a request
    error: str | None = None  # with finish_reason "error"
    observation_tokens: tuple[int, ...] = ()  # of the request's observation, with its first token


class Engine(Protocol):
    """Generates tokens for up to `slots` requests at once."""

    @property
    def slots(self) -> int:
        """Requests that can be active at once."""

    @property
    def version(self) -> int | None:
        """Version of the weights in the engine; None before the first `load_weights`."""

    def active(self) -> int:
        """Requests that hold a slot."""

    def pinned_active(self) -> int:
        """Of these, the pinned ones."""

    def free(self) -> int:
        """Slots that hold no request."""

    def add(self, requests: Sequence[pb.SampleRequest]) -> list[Delta]:
        """Admit at most `free()` requests; needs weights.

        Returns the last deltas of those that end at once: refused ones (finish reason "error"), and
        those whose prefix is already complete.
        """

    def step(self) -> list[Delta]:
        """One decode step for all active requests."""

    def pause(self, *, paused: bool) -> None:
        """`step` is not called from now on, or is again. An engine that works by itself (`GeneratorEngineSpec.pauses`) may go on."""

    def step_seconds(self) -> float:
        """How long to wait before `step` has something to give; 0 for an engine that computes."""

    def cancel(self, leases: Collection[int]) -> None:
        """Forget these requests and free their slots; unknown leases are not an error (they may just have ended)."""

    def load_weights(self, *, version: int, tensors: Mapping[str, TensorBytes]) -> list[Delta]:
        """Replace the weights, bit by bit; active requests go on under the new ones. ValueError changes nothing.

        Returns what was made under the old weights and not given yet.

        The bytes have been verified, and nobody writes to them. The engine keeps none of these buffers but those of a base
        that came with adapters: if the next version has the same ones, only its adapters are loaded.
        """

    @property
    def load_parts(self) -> Mapping[LoadPart, float]:
        """Seconds of the last `load_weights` by part; a part that is missing is in `load`, or took no time."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probs at temperature 1 of the last tokens of each sequence, computed together as one batch, by the way of requests.

        As many tokens as the engine can score; none of a sequence that has no room. Needs weights, and no active request.
        """

    def kv_load(self) -> KvLoad | None:
        """How full the memory for keys and values is; None: there is no bound. From any thread, quick."""

    def metrics(self) -> bytes:
        """Metrics of the engine's own in Prometheus' text format, behind ours on the page; from any thread, quick."""

    def close(self) -> None:
        """End what the engine has started besides this process's own threads. Called once, from any thread; may take seconds."""
