"""Spans as values: their ids, their clock, and the tree that they make up. Knows no OpenTelemetry, and imports nothing heavy.

Ids follow from the run's number and from what a span is about: whoever tells of the same thing gives it the same id, also after a restart.

Instants are of one clock, that of the process which tells: so a child never begins before its parent, whatever the clocks of other machines say.
"""

import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

Value = str | int | float | bool | Sequence[str]
_TRACE_BYTES, _SPAN_BYTES = 16, 8
NS = 1_000_000_000


class SpanId(NamedTuple):
    """Where a span is."""

    trace: int
    span: int

    @property
    def traceparent(self) -> str:
        """As W3C's trace context has it, sampled."""
        return f"00-{self.trace:032x}-{self.span:016x}-01"


class TraceSpan(NamedTuple):
    """Something that took its time in one process."""

    name: str
    id: SpanId
    process: str
    begin_ns: int
    """Unix time, as all instants here."""
    end_ns: int
    parent: SpanId | None = None
    attributes: Mapping[str, Value] = MappingProxyType({})
    links: tuple[SpanId, ...] = ()
    error: str = ""
    """"": it went well."""


class SpanClock:
    """Unix time that never goes back: that of the start, and a monotonic clock from there on."""

    def __init__(self) -> None:
        self._start_ns = time.time_ns() - time.monotonic_ns()

    def __call__(self) -> int:
        """Now, in nanoseconds."""
        return self._start_ns + time.monotonic_ns()


def root_of(run: str, *about: object) -> SpanId:
    """Id of the root of the trace about this."""
    trace = _number(_TRACE_BYTES, run, *about)
    return SpanId(trace, _number(_SPAN_BYTES, trace))


def _number(size: int, *parts: object) -> int:
    """Never 0, which OpenTelemetry takes for none."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=size).digest()) or 1


class SpanTree:
    """The spans of one trace, until its root has ended. All leave together: a process that is killed before has sent none, and none is an orphan."""

    def __init__(self, root: SpanId, *, name: str, process: str, begin_ns: int) -> None:
        self.root = root
        self.begin_ns = begin_ns
        self._name = name
        self._process = process
        self._spans: list[TraceSpan] = []

    def id(self, *path: object) -> SpanId:
        """Id of the span at this path of the tree."""
        return SpanId(self.root.trace, _number(_SPAN_BYTES, self.root.trace, *path))

    def add(
        self,
        name: str,
        *path: object,
        process: str,
        over: tuple[int, int],
        parent: SpanId | None = None,
        attributes: Mapping[str, Value] = MappingProxyType({}),
        links: tuple[SpanId, ...] = (),
        error: str = "",
    ) -> SpanId:
        """One that has ended, at this path below its name; its id. Without a parent it stands below the root. `over`: from when to when."""
        at = self.id(name, *path)
        self._spans.append(TraceSpan(name, at, process, *over, parent or self.root, attributes, links, error))
        return at

    def end(self, *, end_ns: int, attributes: Mapping[str, Value]) -> list[TraceSpan]:
        """All spans, the root first."""
        root = TraceSpan(self._name, self.root, self._process, self.begin_ns, end_ns, None, attributes)
        return [root, *self._spans]
