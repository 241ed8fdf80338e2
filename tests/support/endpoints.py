"""A real HTTP server on loopback that judges, or misbehaves, as a test tells it."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # many connect in one moment; the default of 5 drops some


@dataclass
class Endpoint:
    """Where it is and what it was asked."""

    url: str
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[int] = field(default_factory=set)


Answer = Callable[[BaseHTTPRequestHandler, int], None]
"""(handler, number of the request from 0): writes the answer."""


def say(handler: BaseHTTPRequestHandler, status: int, body: str = "", **headers: str) -> None:
    """One whole answer."""
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("content-length", str(len(body.encode())))
    handler.end_headers()
    handler.wfile.write(body.encode())


def judge(handler: BaseHTTPRequestHandler, number: int) -> None:
    """As OpenAI's servers answer; some are busy when they are asked."""
    message = {"role": "assistant", "content": f"It is 1 of 10, so I give {number % 10}."}
    say(handler, 503 if number % 20 == 7 else 200, json.dumps({"choices": [{"index": 0, "message": message}]}))


@contextmanager
def serving(answer: Answer) -> Iterator[Endpoint]:
    """Serve in threads until the test is done."""
    endpoint = Endpoint(url="")
    counting = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with counting:
                number = len(endpoint.bodies)
                endpoint.bodies.append(json.loads(body))
                endpoint.headers.append({key.lower(): value for key, value in self.headers.items()})
            endpoint.connections.add(self.client_address[1])
            answer(self, number)

        def do_GET(self) -> None:
            answer(self, 0)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    endpoint.url = f"http://127.0.0.1:{server.server_port}/score"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
