"""What an object store may say though it is not so: a way of answering for `S3Server.answers`."""

import io
import re
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Environ = dict[str, Any]
Application = Callable[..., Any]


@dataclass(frozen=True)
class Answer:
    """What the honest server says."""

    status: str
    headers: list[tuple[str, str]]
    body: bytes

    @classmethod
    def of(cls, app: Application, environ: Environ) -> "Answer":
        """Ask it."""
        said: list[Any] = []
        body = b"".join(app(environ, lambda status, headers, *_: said.extend((status, headers))))
        return cls(*said, body)

    def send(self, start_response: Callable[..., Any]) -> list[bytes]:
        """Give the answer, whatever length or checksum it had before."""
        kept = [one for one in self.headers if not one[0].lower().startswith(("content-length", "x-amz-checksum"))]
        start_response(self.status, [*kept, ("Content-Length", str(len(self.body)))])
        return [self.body]


def is_list(environ: Environ) -> bool:
    """Whether names below a prefix are asked for."""
    return "list-type=" in environ["QUERY_STRING"]


@dataclass
class HalfWritten:
    """Takes an object, says so, and keeps half of it."""

    ends: str
    """How the object's name ends."""
    once: bool = False
    """The second write of an object is honest."""
    names: set[str] = field(default_factory=set)
    """What was kept in half."""

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        name = environ["PATH_INFO"]
        honest = (
            environ["REQUEST_METHOD"] != "PUT" or not name.endswith(self.ends) or (self.once and name in self.names)
        )
        if not honest:
            self.names.add(name)
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            half = body[: len(body) // 2]
            kept = {name: value for name, value in environ.items() if not name.startswith("HTTP_X_AMZ_CHECKSUM")}
            environ = kept | {"wsgi.input": io.BytesIO(half), "CONTENT_LENGTH": str(len(half))}
        return app(environ, start_response)


@dataclass
class HalfRead:
    """Gives half of an object as if it were all; `wrong_bytes`: all, but other bytes."""

    ends: str
    wrong_bytes: bool = False

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        if environ["REQUEST_METHOD"] != "GET" or is_list(environ) or not environ["PATH_INFO"].endswith(self.ends):
            return app(environ, start_response)
        honest = Answer.of(app, environ)
        if self.wrong_bytes:
            start_response(honest.status, honest.headers)
            return [bytes(len(honest.body))]
        return Answer(honest.status, honest.headers, honest.body[: len(honest.body) // 2]).send(start_response)


@dataclass
class NoNames:
    """Lists nothing, whatever there is."""

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        if not is_list(environ):
            return app(environ, start_response)
        honest = Answer.of(app, environ)
        body = re.sub(rb"<(Contents|CommonPrefixes)>.*?</\1>", b"", honest.body, flags=re.DOTALL)
        return Answer(honest.status, honest.headers, body).send(start_response)


@dataclass
class OldNames:
    """Lists what there was when each list was first asked for."""

    lists: dict[str, Answer] = field(default_factory=dict)

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        if not is_list(environ):
            return app(environ, start_response)
        asked = environ["QUERY_STRING"]
        if asked not in self.lists:
            self.lists[asked] = Answer.of(app, environ)
        return self.lists[asked].send(start_response)


@dataclass
class Silent:
    """Takes a request of this method, and never answers; what waits is let go at the end."""

    method: str
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        if environ["REQUEST_METHOD"] != self.method:
            return app(environ, start_response)
        self.ended.wait()
        start_response("500 Late", [])
        return []


@dataclass
class OtherTags:
    """Names another ETag in each answer."""

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        honest = Answer.of(app, environ)
        headers = [(k, f'"{uuid.uuid4().hex}"' if k.lower() == "etag" else v) for k, v in honest.headers]
        start_response(honest.status, headers)
        return [honest.body]


@dataclass
class Overwritten:
    """Gives an object, and another writer writes it anew right after."""

    ends: str
    write: Callable[[], None]
    is_done: bool = False

    def __call__(self, app: Application, environ: Environ, start_response: Callable[..., Any]) -> Any:
        """Answer one request."""
        answer = app(environ, start_response)
        if environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].endswith(self.ends) and not self.is_done:
            self.is_done = True
            self.write()
        return answer
