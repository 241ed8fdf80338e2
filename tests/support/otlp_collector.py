"""A collector of traces: a real HTTP server that takes OTLP's protobuf. Also one that takes nothing."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A span as it came."""

    name: str
    trace: str
    span: str
    parent: str
    """"": it is a root."""
    service: str
    process: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """Traces that it links to."""
    error: str


@dataclass(slots=True)
class Collector:
    """What has come."""

    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)
    requests: int = 0
    status: int = 200
    held: threading.Event | None = None
    """Answers wait for it."""

    def trees(self) -> dict[str, list[Received]]:
        """By trace."""
        found = defaultdict(list)
        for span in list(self.spans):
            found[span.trace].append(span)
        return dict(found)

    def take(self, body: bytes) -> None:
        """A request."""
        self.requests += 1
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            process = _attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans.extend(_received(span, process) for span in scope.spans)


@contextmanager
def collecting(*, status: int = 200, hangs: bool = False) -> Iterator[Collector]:
    """A collector that answers with `status`, or not before the end."""
    collector = Collector(status=status, held=threading.Event() if hangs else None)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.held is not None:
                collector.requests += 1
                collector.held.wait()
                return
            collector.take(body)
            self.send_response(collector.status)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    try:
        yield collector
    finally:
        if collector.held is not None:
            collector.held.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _received(span: Any, process: dict[str, Any]) -> Received:
    return Received(
        name=span.name,
        trace=span.trace_id.hex(),
        span=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        service=process["service.name"],
        process=process.get("service.instance.id", ""),
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple(link.trace_id.hex() for link in span.links),
        error=span.status.message,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    return getattr(value, kind)


def assert_connected(spans: list[Received]) -> Received:
    """One root, no orphan, no id twice, and children within their parents; the root."""
    by_id = {span.span: span for span in spans}
    assert len(by_id) == len(spans), "each span has an id of its own"
    (root,) = [span for span in spans if not span.parent]
    for span in spans:
        assert span.begin_ns <= span.end_ns, span
        if span is not root:
            parent = by_id.get(span.parent)
            assert parent is not None, f"an orphan: {span}"
            assert parent.begin_ns <= span.begin_ns, (parent, span)
            assert span.end_ns <= parent.end_ns, (parent, span)
    return root
