"""Sends spans by OTLP over HTTP, in a thread of its own. OpenTelemetry is imported here alone: import this module only when there is something to send.

    put(spans) --> waiting (bounded) --> thread "traces" -- a batch --> endpoint

Thread: consumes spans; produces requests; waits for spans and for the endpoint (`_TIMEOUT_S` for each batch, repetitions included).

Invariants: `put` never waits. Each span is sent, or counted as lost: an endpoint that refuses or hangs, or is slower than what comes, costs spans
and one warning; nothing else. `close` takes `_CLOSE_S` at most.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from streamrl_workers.tracing import attribute_names as names
from streamrl_workers.tracing.spans import SpanId, TraceSpan

_LIMIT = 16_384
"""Spans that wait, of about a kilobyte each."""
_BATCH = 512
_GATHER_S = 1.0
"""For more of them to come."""
_TIMEOUT_S = 10.0
_CLOSE_S = 3.0
_REDIRECTION = 3
"""First digit of such statuses."""
_SCOPE = "streamrl"
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

log = logging.getLogger("streamrl.traces")


def otlp_exporter(endpoint: str) -> SpanExporter:
    """To this address; headers and certificates by OpenTelemetry's own environment variables."""
    own = logging.getLogger("opentelemetry")
    own.setLevel(logging.CRITICAL)  # it warns of each repetition; what is lost is told here
    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S, session=_StatusSession())


class _StatusSession(requests.Session):
    """Session that takes no more of an answer than its status, which is all that counts: a body may have any size, and come at any speed."""

    def request(self, *args: Any, **options: Any) -> requests.Response:  # noqa: ANN401 - as the library
        """Send a request. Raises `requests.TooManyRedirects`: the exporter takes a redirection, which it does not follow, for success."""
        answer = super().request(*args, **options | {"stream": True})
        answer.close()
        if answer.status_code // 100 == _REDIRECTION:
            raise requests.TooManyRedirects(f"the endpoint answers {answer.status_code}")
        return answer


class SpanSender:
    """What waits to be sent."""

    def __init__(
        self, exporter: SpanExporter, *, endpoint: str, common: Mapping[str, str], limit: int = _LIMIT
    ) -> None:
        """`common`: attributes of every process."""
        self._exporter = exporter
        self._endpoint = endpoint
        self._readable = _Readable(common)
        self._limit = limit
        self._waiting: deque[TraceSpan] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._warned = False
        self._on_the_way = 0
        """Spans that the thread is sending."""
        self.sent = 0
        """Spans that the endpoint has taken."""
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, tree: Sequence[TraceSpan]) -> None:
        """Send them, soon: all of them, or none where there is no room."""
        with self._wake:
            fits = not self._waiting or len(self._waiting) + len(tree) <= self._limit
            if fits:
                self._waiting.extend(tree)
                self._wake.notify()
        if not fits:
            self._lose(len(tree), why="takes them more slowly than they come")

    def close(self) -> None:
        """Send what waits, if that is quick."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(_CLOSE_S)
        self._exporter.shutdown()
        with self._wake:
            left = len(self._waiting) + self._on_the_way
            self._waiting.clear()
        self._lose(left, why="has not taken them in time")
        if self.lost:
            log.warning("%d spans were sent, %d are lost", self.sent, self.lost)

    def _lose(self, spans: int, *, why: str) -> None:
        with self._wake:
            self.lost += spans
            first = bool(spans) and not self._warned
            self._warned |= first
        if first:
            log.warning("spans are lost: %s %s", self._endpoint, why)

    # ---- thread

    def _run(self) -> None:
        while batch := self._next_batch():
            taken = self._export(batch)
            self._on_the_way = 0
            if taken:
                self.sent += len(batch)
            else:
                self._lose(len(batch), why="does not take them")

    def _next_batch(self) -> list[TraceSpan]:
        """Empty at the end."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or self._closing)
            self._wake.wait_for(lambda: self._closing or len(self._waiting) >= _BATCH, timeout=_GATHER_S)
            self._on_the_way = min(_BATCH, len(self._waiting))
            return [self._waiting.popleft() for _ in range(self._on_the_way)]

    def _export(self, batch: Sequence[TraceSpan]) -> bool:
        try:
            return self._exporter.export([self._readable.span(span) for span in batch]) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - of a library, over the network: it costs these spans
            log.debug("%s", error)
            return False


class _Readable:
    """Makes OpenTelemetry's spans of ours."""

    def __init__(self, common: Mapping[str, str]) -> None:
        self._common = common
        self._scope = InstrumentationScope(_SCOPE)
        self._resources: dict[str, Resource] = {}

    def span(self, span: TraceSpan) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.id),
            parent=None if span.parent is None else _context(span.parent),
            resource=self._resource(span.process),
            attributes=span.attributes,
            links=[Link(_context(link)) for link in span.links],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _resource(self, process: str) -> Resource:
        if process not in self._resources:
            own = {names.SERVICE_NAME: f"streamrl-{process.partition('-')[0]}", names.SERVICE_INSTANCE: process}
            self._resources[process] = Resource({**self._common, **own})
        return self._resources[process]


def _context(at: SpanId) -> SpanContext:
    return SpanContext(at.trace, at.span, is_remote=False, trace_flags=_SAMPLED)
