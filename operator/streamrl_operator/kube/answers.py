"""What an API server answers, as everything else relies on it: parsed and checked once, at the door.

Owns: the shape of objects, lists, events of a watch, statuses and pages. Does not own: how large an answer may be in bytes
(`connections.py`), and what is done about one that is wrong (`client.py`, the commands' `api.py`). Pure: bytes in, plain data out.
What stands deeper in an object is the API server's to check: it has the schema.
A refusal is one of our errors, in the words of the caller's next move; foreign errors are translated here and in `client.py`.
"""

import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from streamrl.errors import EXIT_FAULT
from streamrl_operator.kube.kinds import CLUSTER, LEASE, Kind
from streamrl_pages.http_fetch import retry_after_s

_MOST_VALUES = 1_000_000
"""Of an answer of an API server: a full page of its largest objects has a fifth of it. A value takes up to 90 bytes once it is made."""
_MOST_PAGE_VALUES = 100_000
"""Of a pod's page: a thousand generators have a fifth of it."""
_NOT_COUNTED = bytes(set(range(256)) - set(b'",[{'))
_STRING = re.compile(rb'"[^"]*+"?+')
_MOST_RETRY_AFTER_S = 300.0
_MOST_PROBLEM_CHARS = 200
NAMES = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
"""Form of a list that has no more than the metadata of its objects."""
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""The same, of one object."""
STATUS = "Status"
"""Kind of what an API server says instead of an object."""


class MalformedError(ValueError):
    """No API server says this."""


class TooManyValuesError(MalformedError):
    """It takes too much memory once it is made; a part of it may not."""


class _Shape(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


_S = TypeVar("_S", bound=_Shape)

Version = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,20}$")]
"""resourceVersion: versions of one API server rise."""


class _Owner(_Shape):
    kind: str
    name: str
    uid: str


class _Metadata(_Shape):
    name: str
    uid: str
    namespace: str
    resourceVersion: Version
    generation: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    ownerReferences: list[_Owner] | None = None
    deletionTimestamp: str | None = None


class _Object(_Shape):
    metadata: _Metadata
    spec: dict[str, Any] | None = None
    status: dict[str, Any] | None = None
    data: dict[str, str] | None = None


class _ClusterMetadata(_Shape):
    name: str
    uid: str


class _ClusterObject(_Shape):
    metadata: _ClusterMetadata
    spec: dict[str, Any] | None = None


class _FollowedClusterMetadata(_ClusterMetadata):
    resourceVersion: Version
    generation: int | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    finalizers: list[str] | None = None
    deletionTimestamp: str | None = None


class _FollowedClusterObject(_ClusterObject):
    metadata: _FollowedClusterMetadata
    status: dict[str, Any] | None = None


class _AccessReviewStatus(_Shape):
    allowed: bool


class _AccessReview(_Shape):
    status: _AccessReviewStatus


class _LeaseSpec(_Shape):
    holderIdentity: str | None = None
    leaseDurationSeconds: int | None = None
    leaseTransitions: int | None = None


class _Lease(_Object):
    spec: _LeaseSpec | None = None  # type: ignore[assignment] # narrower


class _ListMetadata(_Shape):
    resourceVersion: Version
    continue_: str = Field(default="", alias="continue")


class _List(_Shape):
    metadata: _ListMetadata
    items: list[dict[str, Any]] | None = None


class _Event(_Shape):
    type: str
    object: dict[str, Any]


class Cause(_Shape):
    """Why a field is refused."""

    field: str = ""
    message: str = ""
    reason: str = ""


class _Details(_Shape):
    kind: str | None = None
    causes: list[Cause] | None = None
    retryAfterSeconds: Annotated[int, Field(ge=0)] | None = None


class Status(_Shape):
    """What an API server says of a request that it has not done."""

    status: str = ""
    code: int = 0
    reason: str = ""
    message: str = ""
    details: _Details | None = None

    @property
    def retry_after_s(self) -> float | None:
        """How long we are asked to wait; None: nothing is said."""
        return retry_after_s(str(self.details.retryAfterSeconds or "")) if self.details else None


def read_status(body: bytes) -> Status:
    """A refusal as the API server words it; of any other text, the text."""
    try:
        return Status.model_validate_json(body)
    except ValidationError:
        return Status(message=body.decode(errors="replace"))


def read_exit_code(body: bytes) -> int:
    """How a command in a container ended.

    Raises:
        MalformedError: it is not told.
    """
    status = read_status(body)
    causes = (status.details.causes if status.details else None) or ()
    if codes := [cause.message for cause in causes if cause.reason == "ExitCode"]:
        return int(codes[0]) if re.fullmatch(r"[0-9]{1,3}", codes[0]) else EXIT_FAULT
    if status.status == "Success":
        return 0
    raise MalformedError(status.message or "it does not say how the command ended")


def read_object(body: bytes, kind: Kind) -> dict[str, Any]:
    """One object of this kind.

    Raises:
        MalformedError: it is none.
    """
    return check(_mapping(body, most=_MOST_VALUES), kind)


def read_dry_run(body: bytes, kind: Kind) -> dict[str, Any]:
    """An object as a dry run would leave it: a new one has no resourceVersion.

    Raises:
        MalformedError: it is none.
    """
    found = _mapping(body, most=_MOST_VALUES)
    if isinstance(metadata := found.get("metadata"), dict):
        metadata.setdefault("resourceVersion", "0")
    return check(found, kind)


def read_metadata(body: bytes, kind: Kind) -> None:
    """Check an object in the form `METADATA`.

    Raises:
        MalformedError: it is none.
    """
    del kind
    _fits(_Metadata, _mapping(body, most=_MOST_VALUES).get("metadata"))


def read_deleted(body: bytes, kind: Kind) -> dict[str, Any]:
    """The answer to a deletion: the object as it is now, or a Status where it is gone.

    Raises:
        MalformedError: it is neither.
    """
    found = _mapping(body, most=_MOST_VALUES)
    return found if found.get("kind") == STATUS else check(found, kind)


def read_list(body: bytes, kind: Kind) -> tuple[list[dict[str, Any]], str, str]:
    """(objects, resourceVersion, where to go on or empty) of a page of a list.

    Raises:
        TooManyValuesError: a smaller page may be taken.
        MalformedError: it is none.
    """
    found = _mapping(body, most=_MOST_VALUES)
    shape = _fits(_List, found)
    stamp = {"apiVersion": kind.api_version, "kind": kind.kind}  # items do not say what they are
    items = [check(item | stamp, kind) for item in found.get("items") or []]
    return items, shape.metadata.resourceVersion, shape.metadata.continue_


def read_names(body: bytes, kind: Kind) -> tuple[list[tuple[str, str]], str, str]:
    """((namespace, name) of each, resourceVersion, where to go on or empty) of a page of a list in the form `NAMES`.

    Raises:
        MalformedError: it is none.
    """
    del kind
    shape = _fits(_List, _mapping(body, most=_MOST_VALUES))
    found = [_fits(_Metadata, item.get("metadata")) for item in shape.items or []]
    return [(one.namespace, one.name) for one in found], shape.metadata.resourceVersion, shape.metadata.continue_


def read_event(line: bytes, kind: Kind) -> tuple[str, dict[str, Any]]:
    """(ADDED | MODIFIED | DELETED | BOOKMARK | ERROR, object, of an ERROR a Status) of a line of a watch.

    Raises:
        MalformedError: it is none.
    """
    found = _mapping(line, most=_MOST_VALUES)
    event, obj = _fits(_Event, found).type, found["object"]
    if event == "BOOKMARK":
        _fits(_List, obj)  # it has what a list has without items: a version
    elif event != "ERROR":
        check(obj, kind)
    return event, obj


_WARNING = re.compile(r'[0-9]{3} \S+ "((?:[^"\\]|\\.)*)"')
_MOST_WARNINGS = 16


def read_warnings(headers: Sequence[str]) -> list[str]:
    """The texts of `Warning` headers, each in one line."""
    texts = [text for header in headers[:_MOST_WARNINGS] for text in _WARNING.findall(header)]
    return [" ".join(re.sub(r"\\(.)", r"\1", text).split())[:_MAX_MESSAGE_CHARS] for text in texts]


def read_access_review(body: bytes, kind: Kind) -> bool:
    """Whether we may.

    Raises:
        MalformedError: it does not say.
    """
    del kind
    return _fits(_AccessReview, _mapping(body, most=_MOST_VALUES)).status.allowed


def read_page(body: bytes) -> Mapping[str, Any]:
    """A page that a pod serves.

    Raises:
        MalformedError: it is no JSON object, or one of very many values.
    """
    return _mapping(body, most=_MOST_PAGE_VALUES)


def check(obj: dict[str, Any], kind: Kind) -> dict[str, Any]:
    """An object of this kind, parsed.

    Raises:
        MalformedError: it is none.
    """
    if (obj.get("apiVersion"), obj.get("kind")) != (kind.api_version, kind.kind):
        raise MalformedError(f"it is no {kind.kind}")
    _fits(_SHAPES.get(kind, _Object if kind.namespaced else _ClusterObject), obj)
    return obj


_SHAPES: Mapping[Kind, type[_Shape]] = {LEASE: _Lease, CLUSTER: _FollowedClusterObject}
"""Of kinds of which more is relied on."""


def _mapping(body: bytes, *, most: int) -> dict[str, Any]:
    """Values are counted before one is made, which takes forty times its text."""
    if _has_more(body, most):
        raise TooManyValuesError(f"it has more than {most} values")
    try:
        found = from_json(body)
    except ValueError as error:
        raise MalformedError(f"it is no JSON ({error})"[:_MOST_PROBLEM_CHARS]) from None
    if not isinstance(found, dict):
        raise MalformedError("it is no JSON object")
    return found


def _has_more(body: bytes, most: int) -> bool:
    """Whether more values are in it than so many: each stands behind one of `,[{` outside of strings. In linear time."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= most:
        return False
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_COUNTED).replace(b'""', b"")
    return len(marks) - sum(each.end() - each.start() for each in _STRING.finditer(marks)) > most


def _fits(shape: type[_S], value: object) -> _S:
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise MalformedError(f"{where}: {first['msg']}"[:_MOST_PROBLEM_CHARS]) from None


class LineSplitter:
    """The lines of a stream, as its pieces come."""

    def __init__(self) -> None:
        self.begun = bytearray()
        """Behind the last line's end."""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The lines that end in the piece, without their ends."""
        *ended, rest = piece.split(b"\n")
        for line in ended:
            yield self.take() + line
        self.begun += rest

    def take(self) -> bytes:
        """What has begun, which then counts as a line."""
        begun = bytes(self.begun)
        self.begun.clear()
        return begun


async def split_lines(
    chunks: AsyncIterator[bytes], *, unfinished: bool = True, cut_bytes: float = math.inf
) -> AsyncIterator[bytes]:
    """The lines without their ends. `unfinished`: also what stands behind the last line's end. `cut_bytes`: a line of at least so much
    is given in parts; without it the stream has its own bound."""
    lines = LineSplitter()
    async for chunk in chunks:
        for line in lines.feed(chunk):
            yield line
        if len(lines.begun) >= cut_bytes:
            yield lines.take()
    if unfinished and lines.begun:
        yield lines.take()


class KubeError(Exception):
    """A request was not done.

    Args:
        what: verb and path of the request.
        status: HTTP status; 0 = no answer.
        reason: one word: the API server's, or ours.
        message: one line.
        retry_after_s: how long the API server asks us to wait.
    """

    def __init__(
        self, what: str, *, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(f"{what}: {status or 'no answer'} {reason}: {message}")


class NotFoundError(KubeError):
    """It is not there (any more)."""


class ConflictError(KubeError):
    """It has changed since it was read, or exists already: look again."""


class ExpiredError(KubeError):
    """The version to go on from is too old: list again."""


class RequestRefusedError(KubeError):
    """The API server will not have it, however often we ask: wrong or forbidden."""


class ForbiddenError(RequestRefusedError):
    """We have no right to it."""


class UnavailableError(KubeError):
    """The API server is overloaded, broken or out of reach: ask later."""


class UnusableError(UnavailableError):
    """The answer came, and cannot be taken: to the same request comes the same."""


class TooLargeError(UnusableError):
    """The answer is longer than we read, or has more values."""


_BY_STATUS: dict[int, type[KubeError]] = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    410: ExpiredError,
    408: UnavailableError,
    429: UnavailableError,
}
SERVER_ERROR = 500
_NOT_IN_SCHEMA = "failed to create typed patch object"
"""With it an API server answers 500 to an apply with a field that it does not know: the body's fault, however often it is sent."""
_MAX_MESSAGE_CHARS, _MAX_REASON_CHARS = 500, 60


def from_status(what: str, status: int, reported: Status, *, retry_after_s: float | None = None) -> KubeError:
    """The error that an answer other than 2xx stands for. `retry_after_s`: by its header."""
    message = " ".join((reported.message or "no message").split())
    is_broken = status >= SERVER_ERROR and not message.startswith(_NOT_IN_SCHEMA)
    asked_s = reported.retry_after_s if retry_after_s is None else retry_after_s
    found = _BY_STATUS.get(status) or (UnavailableError if is_broken else RequestRefusedError)
    return found(
        what,
        status=status,
        reason=(reported.reason or "Error")[:_MAX_REASON_CHARS],
        message=message[:_MAX_MESSAGE_CHARS],
        retry_after_s=None if asked_s is None else min(asked_s, _MOST_RETRY_AFTER_S),
    )
