"""Sending: bounded, counted, and without a wait for who puts."""

import contextlib
import http.client
import io
import socketserver
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from streamrl_workers.tracing import otlp
from streamrl_workers.tracing.otlp import SpanSender, otlp_exporter
from streamrl_workers.tracing.spans import SpanTree, TraceSpan, root_of
from support.memory import memory_limit


def spans(count: int) -> list[TraceSpan]:
    root = root_of("run", "group", 1)
    tree = SpanTree(root, name="group", process="scheduler", begin_ns=5)
    for number in range(count - 1):
        tree.add("train", number, process="trainer-0", over=(6, 7), error="lost")
    return tree.end(end_ns=8, attributes={"streamrl.group.id": 1})


class HeldExporter(InMemorySpanExporter):
    """Takes nothing until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.may.wait()
        return super().export(spans)


def test_a_tree_arrives_as_it_was_put() -> None:
    exporter = InMemorySpanExporter()
    sender = SpanSender(exporter, endpoint="here", common={"streamrl.job": "j"})
    sender.put(spans(3))
    sender.close()
    root, *others = exporter.get_finished_spans()
    assert (sender.sent, sender.lost) == (3, 0)
    assert (root.name, root.parent, root.start_time, root.end_time) == ("group", None, 5, 8)
    assert root.resource.attributes == {
        "streamrl.job": "j",
        "service.name": "streamrl-scheduler",
        "service.instance.id": "scheduler",
    }
    assert {span.parent.span_id for span in others if span.parent} == {root.context.span_id}
    assert {span.status.description for span in others} == {"lost"}
    assert len({span.context.span_id for span in (root, *others)}) == 3


def test_an_answer_without_end_is_not_read() -> None:
    class Endless(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(bytes(2**20))

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/v1/traces"
        sender = SpanSender(otlp.otlp_exporter(address), endpoint=address, common={})
        sender.put(spans(3))
        with memory_limit(2**28):
            sender.close()
        server.shutdown()
    assert (sender.sent, sender.lost) == (3, 0)


def test_what_does_not_fit_is_lost_and_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    exporter = HeldExporter()
    sender = SpanSender(exporter, endpoint="here", common={}, limit=10)
    sender.put(spans(1))
    assert exporter.asked.wait(60)
    for _ in range(3):
        sender.put(spans(10))
    exporter.may.set()
    sender.close()
    assert (sender.sent, sender.lost) == (11, 20)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == ["spans are lost: here takes them more slowly than they come", "11 spans were sent, 20 are lost"]


def test_what_the_endpoint_has_not_answered_at_the_end_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "_CLOSE_S", 0.0)
    exporter = HeldExporter()
    sender = SpanSender(exporter, endpoint="here", common={})
    sender.put(spans(2))
    assert exporter.asked.wait(60)
    sender.put(spans(3))
    sender.close()
    assert (sender.sent, sender.lost) == (0, 5)
    assert "0 spans were sent, 5 are lost" in caplog.text
    exporter.may.set()


@pytest.mark.parametrize(
    ("answer", "counts"),
    [(b"200 OK\r\nContent-Length: 99999999999\r\n\r\n", (3, 0)), (b"307 Go\r\nLocation: /other\r\n\r\n", (0, 3))],
    ids=["a body without end", "a redirection"],
)
def test_of_an_answer_the_status_alone_is_taken(answer: bytes, counts: tuple[int, int]) -> None:
    class Endless(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = int(http.client.parse_headers(io.BytesIO(self._head()))["Content-Length"])
            self.rfile.read(length)
            with contextlib.suppress(ConnectionError):
                self.wfile.write(b"HTTP/1.1 " + answer)
                while answer.startswith(b"200"):
                    self.wfile.write(bytes(2**20))

        def _head(self) -> bytes:
            self.rfile.readline()
            return b"".join(iter(self.rfile.readline, b"\r\n"))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Endless) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="collector")
        serving.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        sender = SpanSender(otlp_exporter(endpoint), endpoint=endpoint, common={})
        sender.put(spans(3))
        sender.close()
        server.shutdown()
        serving.join()
    assert (sender.sent, sender.lost) == counts


def test_a_tree_above_the_limit_goes_where_nothing_waits() -> None:
    exporter = InMemorySpanExporter()
    sender = SpanSender(exporter, endpoint="here", common={}, limit=10)
    sender.put(spans(11))
    sender.close()
    assert (sender.sent, sender.lost) == (11, 0)


def test_a_job_that_traces_nothing_imports_nothing() -> None:
    """Nor does one that traces a share of 0: OpenTelemetry would be half of the scheduler's memory."""
    code = """
import sys
import streamrl_workers.scheduler.main
from pathlib import Path
from streamrl.spec import parse_job
from streamrl_workers.scheduler.records import Recovered
from streamrl_workers.scheduler.traces.tracer import make_tracer
from support.jobs import simulated_job
for tracing in ({}, {"tracing": {"endpoint": "http://127.0.0.1:1/v1/traces", "sharePercent": 0}}):
    job = simulated_job()
    job["spec"] |= tracing
    assert make_tracer(parse_job(job), run_dir=Path("/nowhere"), recovered=Recovered()) is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    path = ":".join(part for part in sys.path if part)
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
