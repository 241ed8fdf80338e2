"""Collects what requests gain, and packs each gain into exactly one message.

Owns: tokens not yet sent, by lease. Does not own: when messages are sent, the engine.

Invariants:
- A token of a known lease is in exactly one `Progress`, under the version that made it.
- Gains of a forgotten (cancelled, lost) lease are dropped.
- The first `Progress` of a lease has the tokens of prompt and observation; the last has a finish reason.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streamrl.proto import stream_pb2 as pb
from streamrl_workers.generator.engine import Delta
from streamrl_workers.stream.packing import pack_float32, pack_int32

MAX_BATCH_BYTES = 4 * 2**20
"""Of one message: far below gRPC's limit, large enough that framing costs nothing."""
_BYTES_PER_TOKEN = 8
"""Token and log-prob."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Gain:
    lease: int
    admitted_s: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: list[pb.VersionSpan] = field(default_factory=list)
    prompt_tokens: Sequence[int] | None = None
    observation_tokens: Sequence[int] = ()

    def size_bytes(self) -> int:
        return _BYTES_PER_TOKEN * (len(self.tokens) + len(self.observation_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    message: pb.Progress
    size_bytes: int


class ProgressBook:
    """Gains since the last message, by lease."""

    def __init__(self) -> None:
        self._running: dict[int, _Gain] = {}
        self._ended: list[_Ended] = []
        self.unsent_bytes = 0  # of ended requests
        self.tokens = 0  # taken since start

    def admit(self, leases: Iterable[int], *, now_s: float) -> None:
        """These requests are in the engine from `now_s` on."""
        for lease in leases:
            self._running[lease] = _Gain(lease=lease, admitted_s=now_s)

    def forget(self, leases: Iterable[int]) -> None:
        """Drop what these requests have gained and will gain."""
        for lease in leases:
            self._running.pop(lease, None)

    def clear(self) -> None:
        """Forget everything: nobody will receive it."""
        self._running.clear()
        self._ended.clear()
        self.unsent_bytes = 0

    def take(self, deltas: Iterable[Delta], *, version: pb.VersionName, now_s: float) -> None:
        """Add what an engine call gave under `version`, the weights in the engine."""
        for delta in deltas:
            gain = self._running.get(delta.request_id)
            if gain is None:
                continue
            assert delta.version == version.step, f"delta of version {delta.version}, engine has {version.step}"
            self._add(gain, delta, version=version)
            if delta.finish_reason is not None:
                self._end(gain, delta, now_s=now_s)

    def has_ended(self) -> bool:
        """Whether a request has ended whose end is not sent yet."""
        return bool(self._ended)

    def pop_ended(self) -> list[pb.ProgressBatch]:
        """Messages with the ends that are not sent yet."""
        ended, self._ended = self._ended, []
        self.unsent_bytes = 0
        return _batches(ended)

    def pop_running(self) -> list[pb.ProgressBatch]:
        """Messages with the gains of running requests."""
        gains = [gain for gain in self._running.values() if gain.tokens]
        return _batches([_Ended(size_bytes=gain.size_bytes(), message=_packed(gain)) for gain in gains])

    def _add(self, gain: _Gain, delta: Delta, *, version: pb.VersionName) -> None:
        if delta.prompt_tokens is not None:
            gain.prompt_tokens = delta.prompt_tokens
        if delta.observation_tokens:
            gain.observation_tokens = delta.observation_tokens
        count = len(delta.tokens)
        if not count:
            return
        gain.tokens.extend(delta.tokens)
        gain.logprobs.extend(delta.logprobs)
        self.tokens += count
        last = gain.spans[-1] if gain.spans else None
        if last is not None and last.step == version.step and last.attempt == version.attempt:
            last.tokens += count
        else:
            gain.spans.append(pb.VersionSpan(tokens=count, step=version.step, attempt=version.attempt))

    def _end(self, gain: _Gain, delta: Delta, *, now_s: float) -> None:
        del self._running[gain.lease]
        size_bytes = gain.size_bytes()
        message = _packed(gain)
        message.finish_reason = delta.finish_reason or ""
        message.text = delta.text or ""
        message.error = delta.error or ""
        message.generate_s = now_s - gain.admitted_s
        self._ended.append(_Ended(message=message, size_bytes=size_bytes))
        self.unsent_bytes += size_bytes


def _packed(gain: _Gain) -> pb.Progress:
    """The gain as a message; the gain is empty afterwards."""
    message = pb.Progress(
        lease=gain.lease,
        tokens=pack_int32(gain.tokens),
        logprobs=pack_float32(gain.logprobs),
        spans=gain.spans,
        prompt_tokens=b"" if gain.prompt_tokens is None else pack_int32(gain.prompt_tokens),
        observation_tokens=pack_int32(gain.observation_tokens),
    )
    gain.observation_tokens = ()
    gain.tokens, gain.logprobs, gain.spans, gain.prompt_tokens = array("i"), array("f"), [], None
    return message


def _batches(items: Sequence[_Ended]) -> list[pb.ProgressBatch]:
    """As few messages as the size limit allows."""
    batches: list[pb.ProgressBatch] = []
    room_bytes = 0
    for item in items:
        if not batches or item.size_bytes > room_bytes:
            batches.append(pb.ProgressBatch())
            room_bytes = MAX_BATCH_BYTES
        batches[-1].items.append(item.message)
        room_bytes -= item.size_bytes
    return batches
