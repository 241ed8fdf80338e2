"""A real S3 server on loopback (moto's), which can kill its client at any of its writes."""

import itertools
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

BUCKET = "runs"
_WRITES = frozenset(("PUT", "POST", "DELETE"))


@dataclass(frozen=True)
class Kill:
    """The process `pid` is killed at its n-th write, before the server has done it."""

    n: int
    pid: int


@dataclass
class S3Server:
    """The application, which counts writes."""

    port: int = 0
    kill: Kill | None = None
    kills: int = 0
    lists: int = 0
    """Requests for the names below a prefix."""
    refusal: str = ""
    """Code of S3 that each write is refused with; empty = none is."""
    answers: Callable[..., Any] | None = None
    """Answers instead of the application, which it gets first (`support/s3_lies.py`)."""
    _app: Callable[..., Any] = field(default_factory=lambda: DomainDispatcherApplication(create_backend_app))
    _writes: Iterator[int] = field(default_factory=itertools.count)

    def arm(self, kill: Kill) -> None:
        """Count from here."""
        self.kill, self._writes = kill, itertools.count(1)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        self.lists += "list-type=" in environ["QUERY_STRING"]
        if self.refusal and environ["REQUEST_METHOD"] in _WRITES:
            start_response("503 Slow Down" if self.refusal == "SlowDown" else "403 Forbidden", [])
            return [f"<Error><Code>{self.refusal}</Code><Message>no</Message></Error>".encode()]
        kill = self.kill
        if kill is None or environ["REQUEST_METHOD"] not in _WRITES or next(self._writes) != kill.n:
            return self._answer(environ, start_response)
        self.kills += 1
        os.kill(kill.pid, signal.SIGKILL)
        start_response("500 Killed", [])
        return []

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        if self.answers is None:
            return self._app(environ, start_response)
        return self.answers(self._app, environ, start_response)

    def reset(self) -> None:
        """Nothing but an empty bucket, whatever was there: moto's state is the process's."""
        for path, method in (("moto-api/reset", "POST"), (BUCKET, "PUT")):
            request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", method=method)
            urllib.request.urlopen(request, timeout=30).close()

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to find it."""
        return {
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


class _Silent(WSGIRequestHandler):
    def log_request(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server with an empty bucket."""
    app = S3Server()
    server: BaseWSGIServer = make_server("127.0.0.1", 0, app, threaded=True, request_handler=_Silent)
    app.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="s3")
    thread.start()
    try:
        app.reset()
        yield app
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
