"""What this generator has to tell the scheduler, until the link's writer takes it: control events, and tokens not yet sent.

Owns both, and the packing of each request's gain into messages. Does not own the connection, nor when to send.

Invariants:
- A token of a known lease is in exactly one `Progress`, under the version that made it; gains of a forgotten lease are dropped.
- The first `Progress` of a lease has the tokens of prompt and observation; the last has a finish reason.
- Progress made before a control event is sent before it.
- Nothing is kept while there is no connection: the next hello tells the rest.
- Bounded: running requests by slots and token limits, ended ones by `full` (the engine loop pauses).
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engines.base import Delta
from streamrl_workers.stream.messages import ERROR_CHARS
from streamrl_workers.stream.packing import batches, pack_float32, pack_int32

_MAX_UNSENT_BYTES = 32 * 2**20
"""Of ended requests; more than that and the engine pauses until the scheduler has taken them."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Gain:
    lease: int
    admitted_s: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens by attempt and step, which only rise
    prompt_tokens: Sequence[int] | None = None
    observation_tokens: Sequence[int] = ()


class GeneratorOutbox:
    """Gains and events since the last message, by lease; handed from the engine loop to the link's writer."""

    def __init__(self) -> None:
        self.filled = asyncio.Event()  # something is to be sent now
        self.tokens = 0  # taken since start
        self._running: dict[int, _Gain] = {}
        self._ended: list[pb.Progress] = []
        self._ended_bytes = 0
        self._controls: deque[pb.GeneratorEvent] = deque()
        self._open = False

    def open(self) -> None:
        """A connection is there: begin to keep events."""
        self.clear()
        self._open = True

    def clear(self) -> None:
        """The connection is gone, and with it everything that was to be sent."""
        self._open = False
        self._controls.clear()
        self._running.clear()
        self._ended.clear()
        self._ended_bytes = 0

    @property
    def full(self) -> bool:
        """Whether the engine must pause."""
        return self._ended_bytes > _MAX_UNSENT_BYTES

    @property
    def has_ended(self) -> bool:
        """Whether the end of a request waits to be sent."""
        return bool(self._ended)

    def admit(self, leases: Iterable[int], *, now_s: float) -> None:
        """These requests are in the engine from `now_s` on."""
        for lease in leases:
            self._running[lease] = _Gain(lease=lease, admitted_s=now_s)

    def forget(self, leases: Iterable[int]) -> None:
        """Drop what these requests have gained and will gain."""
        for lease in leases:
            self._running.pop(lease, None)

    def take(self, deltas: Iterable[Delta], *, version: pb.VersionName, now_s: float) -> None:
        """Add what an engine call gave under `version`, the weights in the engine. Ended requests are sent at once."""
        made_by = version.attempt, version.step
        for delta in deltas:
            gain = self._running.get(delta.lease)
            if gain is None:
                continue
            assert delta.version == made_by[1], f"delta of version {delta.version}, engine has {made_by[1]}"
            self._add(gain, delta, made_by=made_by)
            if delta.finish_reason is not None:
                self._end(gain, delta, now_s=now_s)

    def post(self, event: pb.GeneratorEvent) -> None:
        """Send `event`, after the progress so far."""
        if self._open:
            self._controls.append(event)
            self.filled.set()

    def pop(self, *, running: bool) -> list[pb.GeneratorEvent]:
        """Everything to be sent now; `running`: the gains of running requests, too."""
        self.filled.clear()
        items, self._ended, self._ended_bytes = self._ended, [], 0
        if running or self._controls:
            items += [_packed(gain) for gain in self._running.values() if gain.tokens]
        sized = batches(items, size_bytes=pb.Progress.ByteSize)
        events = [pb.GeneratorEvent(progress=pb.ProgressBatch(items=batch)) for batch in sized]
        events += self._controls
        self._controls.clear()
        return events

    def _add(self, gain: _Gain, delta: Delta, *, made_by: tuple[int, int]) -> None:
        if delta.prompt_tokens is not None:
            gain.prompt_tokens = delta.prompt_tokens
        if delta.observation_tokens:
            gain.observation_tokens = delta.observation_tokens
        gain.logprobs.extend(delta.logprobs)
        if count := len(delta.tokens):
            gain.tokens.extend(delta.tokens)
            gain.spans[made_by] = gain.spans.get(made_by, 0) + count
            self.tokens += count

    def _end(self, gain: _Gain, delta: Delta, *, now_s: float) -> None:
        del self._running[gain.lease]
        message = _packed(gain)
        message.finish_reason = delta.finish_reason or ""
        message.text = delta.text or ""
        message.error = (delta.error or "")[:ERROR_CHARS]
        message.generate_s = now_s - gain.admitted_s
        self._ended.append(message)
        self._ended_bytes += message.ByteSize()
        self.filled.set()


def _packed(gain: _Gain) -> pb.Progress:
    """The gain as a message; the gain is empty afterwards."""
    message = pb.Progress(
        lease=gain.lease,
        tokens=pack_int32(gain.tokens),
        logprobs=pack_float32(gain.logprobs),
        spans=[
            pb.VersionSpan(tokens=count, step=step, attempt=attempt) for (attempt, step), count in gain.spans.items()
        ],
        prompt_tokens=b"" if gain.prompt_tokens is None else pack_int32(gain.prompt_tokens),
        observation_tokens=pack_int32(gain.observation_tokens),
    )
    gain.observation_tokens = ()
    gain.tokens, gain.logprobs, gain.spans, gain.prompt_tokens = array("i"), array("f"), {}, None
    return message
