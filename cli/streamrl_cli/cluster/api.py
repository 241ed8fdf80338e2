"""The commands' door to an API server: the user's context, plain objects in and out, refusals as one line.

Owns requests as a person makes them (server-side apply that asks before it takes fields from others, patches, logs), what a
refusal is called, and how long a silent API server is asked again. Credentials, connections and answers are the
operator's (`streamrl_operator.kube`); its client speaks as the operator does (by force, without the API server's causes), so
there is one here.
Every request has a deadline; only a followed log has none between its lines. Every answer has a bound; a log's lines are cut at theirs.
"""

import argparse
import errno
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from streamrl import API_GROUP
from streamrl.errors import UserError, UserErrors
from streamrl_cli.cluster.kubeconfig import NoKubeconfigError, choose
from streamrl_operator.kube import answers
from streamrl_operator.kube.answers import Cause, LineSplitter, read_status, split_lines
from streamrl_operator.kube.kinds import POD, SCALE, Kind
from streamrl_pages.http_fetch import OversizeError, one_line

if TYPE_CHECKING:
    from streamrl_operator.kube.connections import ApiConnection
    from streamrl_operator.kube.rest_config import RestConfig
    from streamrl_pages.http_client import BoundedResponse

MANAGER = "streamrl-cli"
"""Field manager of all that the commands write."""
REQUEST_TIMEOUT_S, PAGE_TIMEOUT_S = 20.0, 5.0
Object = dict[str, Any]
_T = TypeVar("_T")
_CONNECT_TIMEOUT_S = 10.0
_APPLY, _MERGE = "application/apply-patch+yaml", "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_PAGE = 100
"""Objects of one page of a list: a pod takes 10 KB, and an answer has its bound."""
_LINE_BYTES = 2**20
"""Of a log: what a program writes without an end of line is shown in parts of this size."""
LONGEST_LINE_BYTES = 2**28
"""Of what a command in a pod says: a sample of a million tokens, with their log-probs, takes some 30 MB."""
_CHUNK_BYTES = 2**16
_EXEC_PROTOCOL = "v4.channel.k8s.io"
_STDOUT, _STDERR, _STATUS = 1, 2, 3
"""Channels of it: the first byte of each message."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REDIRECT = 300
_METHODS = {"get": "GET", "list": "GET", "patch": "PATCH", "delete": "DELETE"}
_MAX_MESSAGE_CHARS = 2000
_USER = re.compile(r'User "([^"]*)"')
_INSTALL = (
    "install the operator there: helm install streamrl helm/streamrl --namespace streamrl-system --create-namespace "
    "--set images.registry=REGISTRY"
)
IN_POD = "in-cluster"
"""Stands for the name of a context where there is none."""
LIMIT_S = 120.0
"""An API server is restarted, or a laptop changes its network, in less."""


class UnreachableError(UserError):
    """The API server gave no answer."""


class RefusedForNowError(UnreachableError):
    """It, or what stands behind it, cannot answer now: 429 and 5xx. Another question may get its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What was asked of which cluster."""

    verb: str
    """As roles name it: get, list, patch, delete."""
    kind: Kind
    namespace: str
    context: str
    """Name of the kubeconfig's context."""
    name: str = ""
    subresource: str = ""

    @property
    def plural(self) -> str:
        """The kind with its group: `rljobs.streamrl.io`."""
        group, slash, _ = self.kind.api_version.partition("/")
        return f"{self.kind.plural}.{group}" if slash else self.kind.plural

    @property
    def resource(self) -> str:
        """As roles name it: `pods/log`."""
        return f"{self.plural}{f'/{self.subresource}' if self.subresource else ''}"

    @property
    def path(self) -> str:
        """Of the API server."""
        return self.kind.path(self.namespace, self.name or None, self.subresource or None)

    @property
    def thing(self) -> str:
        """What was asked for: `rljobs.streamrl.io/chain-sum`."""
        return f"{self.plural}{f'/{self.name}' if self.name else ''}"


def add_connection(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Arguments that say which cluster and namespace; with `several`, `--namespace` may be given again and is a list."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    group.add_argument(
        "-n",
        "--namespace",
        metavar="NAME",
        action="append" if several else "store",
        help=f"namespace (default: the context's){'; may be given again' if several else ''}",
    )
    group.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="kubeconfig (default: $KUBECONFIG, else ~/.kube/config)"
    )


@asynccontextmanager
async def connect(args: argparse.Namespace) -> AsyncIterator["ApiClient"]:
    """The cluster that the arguments of `add_connection` mean; in a pod without a kubeconfig its own, by the pod's service account.

    Raises `UserError`: the client is not installed, or there is no such context.
    """
    try:
        from streamrl_operator.kube import connections
        from streamrl_pages import http_client
    except ModuleNotFoundError as error:
        rule = f"commands over clusters need the package {error.name}, which is not installed"
        raise UserError(field="streamrl", rule=rule, fix="pip install 'streamrl[operator]'") from None
    access, context = _access(args)
    if access.proxy is None and urlsplit(access.server).hostname not in _LOOPBACK:  # as kubectl
        access.proxy = http_client.environment_proxy(access.server)
    async with aclosing(connections.ApiConnection(access, agent=MANAGER)) as connection:
        yield ApiClient(connection, context=context, namespace=args.namespace or access.namespace)


def _access(args: argparse.Namespace) -> tuple["RestConfig", str]:
    """How the cluster is reached, and the name of the context."""
    from streamrl_operator.kube import kubeconfig

    try:
        chosen = choose(kubeconfig=args.kubeconfig, context=args.context)
    except NoKubeconfigError:
        if not args.kubeconfig and not args.context:
            with suppress(UserError):
                return kubeconfig.from_service_account(kubeconfig.SERVICE_ACCOUNT_DIR, os.environ), IN_POD
        raise
    return kubeconfig.from_kubeconfig(chosen.text, source=chosen.source, context=chosen.context), chosen.context


class ApiClient:
    """One API server, in the name of a person."""

    def __init__(
        self, connection: "ApiConnection", *, context: str, namespace: str, timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self.access = connection.access
        self.context = context
        self.namespace = namespace
        """Where objects are that say nothing else; empty: lists are of all namespaces."""
        self._connection = connection
        self._timeout_s = timeout_s

    def within(self, namespace: str) -> "ApiClient":
        """The same for another namespace."""
        return ApiClient(self._connection, context=self.context, namespace=namespace, timeout_s=self._timeout_s)

    async def get(self, kind: Kind, name: str) -> Object:
        """One object. Raises `ObjectNotFoundError`: it is not there."""
        return await self._ask(self._call("get", kind, name))

    async def find(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Object]:
        """All objects that the selectors take."""
        return [one async for page in self.pages(kind, labels=labels, fields=fields) for one in page]

    async def pages(self, kind: Kind, *, labels: str = "", fields: str = "") -> AsyncGenerator[list[Object], None]:
        """The same, some at a time."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        query = {key: value for key, value in query.items() if value} | {"limit": str(_PAGE)}
        while True:
            items, _, more = await self._read(answers.read_list, self._call("list", kind), query=query)
            yield items
            if not more:
                return
            query["continue"] = more

    async def apply(self, kind: Kind, obj: Mapping[str, Any], *, force: bool = False, dry_run: bool = False) -> Object:
        """Server-side apply; fields that somebody else has set since are refused unless by `force`."""
        query = {"fieldManager": MANAGER, "force": str(force).lower(), "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        call = self._call("patch", kind, obj["metadata"]["name"])
        read = answers.read_dry_run if dry_run else answers.read_object
        return await self._read(read, call, query=query, body=obj, content_type=_APPLY)

    async def merge(self, kind: Kind, name: str, change: Mapping[str, Any]) -> Object:
        """JSON merge patch."""
        call = self._call("patch", kind, name)
        return await self._ask(call, query={"fieldManager": MANAGER}, body=change, content_type=_MERGE)

    async def scale(self, kind: Kind, name: str, *, replicas: int) -> None:
        """Set the size of an object that has `/scale`."""
        call, change = self._call("patch", kind, name, "scale"), {"spec": {"replicas": replicas}}
        request: dict[str, Any] = {"query": {"fieldManager": MANAGER}, "body": change, "content_type": _MERGE}
        async with self._answer(call, total_s=self._timeout_s, **request) as response:
            answers.read_object(await response.read(), SCALE)

    async def patch(self, kind: Kind, name: str, changes: Sequence[Mapping[str, Any]]) -> Object:
        """JSON patch: with a `test` that does not hold nothing is done."""
        call = self._call("patch", kind, name)
        return await self._ask(call, query={"fieldManager": MANAGER}, body=changes, content_type=_JSON_PATCH)

    async def delete(self, obj: Mapping[str, Any], kind: Kind) -> None:
        """Delete this very object: one that has come in its place stays."""
        meta = obj["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": meta["uid"]}}
        await self._read(answers.read_deleted, self._call("delete", kind, meta["name"]), body=body)

    async def page(self, pod: str, *, port: int, path: str = "status") -> Mapping[str, Any] | None:
        """A page of a process of a job, through the API server; None: nobody answers there, or the user may not ask."""
        call = self._call("get", POD, f"{pod}:{port}", f"proxy/{path}")
        try:
            async with self._answer(call, total_s=PAGE_TIMEOUT_S) as response:
                return answers.read_page(await response.read())
        except (UserError, UserErrors):
            return None

    async def log(self, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Lines of a container's log; with `follow` in `query` until the container ends."""
        call = self._call("get", POD, pod, "log")
        async with self._answer(call, query={"container": container, **query}, total_s=None) as response:
            chunks = response.at_most().content.iter_chunked(_CHUNK_BYTES)
            async for line in split_lines(chunks, cut_bytes=_LINE_BYTES):
                yield _text(line)

    async def run_in(
        self,
        pod: str,
        container: str,
        command: Sequence[str],
        *,
        out: Callable[[str], None],
        err: Callable[[str], None],
    ) -> int:
        """Run a command in a container, as `kubectl exec` does, and return its exit code. `out` and `err` are given its lines. Afterwards nothing
        can be asked any more.

        A user needs `create` of `pods/exec`, before Kubernetes 1.35 `get` instead.
        """
        import aiohttp

        call = self._call("exec", POD, pod, "exec")
        query = [("container", container), ("stdout", "1"), ("stderr", "1"), *(("command", word) for word in command)]
        told, said = {_STDOUT: out, _STDERR: err}, b""
        lines = {channel: LineSplitter() for channel in told}
        with self._reaching(call):
            try:
                socket = await self._connection.websocket(
                    call.path,
                    params=query,
                    protocols=(_EXEC_PROTOCOL,),
                    timeout=aiohttp.ClientWSTimeout(ws_receive=REQUEST_TIMEOUT_S),
                    autoclose=False,
                )
            except aiohttp.WSServerHandshakeError as error:
                raise _no_exec(call, code=error.status) from None
            try:
                async for message in socket:
                    if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                        raise answers.MalformedError("it is no output of a command")
                    channel, piece = message.data[0], message.data[1:]
                    if channel in told:
                        told[channel](*map(_text, lines[channel].feed(piece)))
                        if len(lines[channel].begun) > LONGEST_LINE_BYTES:
                            rule = f"what it says has a line of more than {LONGEST_LINE_BYTES // 2**20} MiB"
                            raise UserError(field=call.thing, rule=rule, fix="ask for less of it")
                    elif channel == _STATUS:
                        said += piece
                        if len(said) > _LINE_BYTES:
                            raise answers.MalformedError("its exit status has no end")
            finally:
                # The session waits for the end of connections in use; of one whose socket was closed first it would not.
                await self._connection.aclose()
                await socket.close()
            for channel, tell in told.items():
                if rest := lines[channel].take():
                    tell(_text(rest))
            return answers.read_exit_code(said)

    def _call(self, verb: str, kind: Kind, name: str = "", subresource: str = "") -> Call:
        return Call(
            verb=verb, kind=kind, name=name, subresource=subresource, namespace=self.namespace, context=self.context
        )

    async def _ask(self, call: Call, **request: Any) -> Object:  # noqa: ANN401 - as `_answer` takes it
        return await self._read(answers.read_object, call, **request)

    async def _read(self, read: Callable[[bytes, Kind], _T], call: Call, **request: Any) -> _T:  # noqa: ANN401 - as `_answer` takes it
        async with self._answer(call, total_s=self._timeout_s, **request) as response:
            return read(await response.read(), call.kind)

    @asynccontextmanager
    async def _answer(
        self,
        call: Call,
        *,
        total_s: float | None,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
    ) -> AsyncIterator["BoundedResponse"]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S)
        data, headers = None if body is None else json.dumps(body).encode(), {"Content-Type": content_type}
        request: dict[str, Any] = {"params": query, "data": data, "headers": headers, "timeout": timeout}
        with self._reaching(call):
            async with self._connection.request(_METHODS[call.verb], call.path, **request) as response:
                if response.status >= _REDIRECT:
                    raise refusal(call, code=response.status, body=await response.read())
                yield response

    @contextmanager
    def _reaching(self, call: Call) -> Iterator[None]:
        """What goes wrong inside is told as an API server that cannot be reached."""
        import aiohttp

        try:
            yield
        except (answers.MalformedError, OversizeError) as error:
            raise self._unreachable(f"what it says to {call.verb} {call.thing} cannot be used: {error}") from None
        except TimeoutError:
            raise self._unreachable(f"no whole answer to {call.verb} {call.thing} in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(_reason(error)) from None

    def _unreachable(self, reason: str) -> UnreachableError:
        return UnreachableError(
            field=f"context {self.context}",
            rule=f"its API server {self.access.server} cannot be reached ({reason})",
            fix="check `kubectl cluster-info`, or choose another with --context",
        )


def _reason(error: BaseException) -> str:
    """The last words of an error of the network: `Connection refused`."""
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, OSError) and inner.errno is not None and inner.errno in errno.errorcode:
        return os.strerror(inner.errno)  # asyncio puts the address where the words should be
    return one_line(inner)


class ObjectNotFoundError(UserError):
    """The object is not there."""


def refusal(call: Call, *, code: int, body: bytes) -> UserError | UserErrors:
    """The error for an answer that is not a success."""
    status = read_status(body)
    message = " ".join(status.message.split())[:_MAX_MESSAGE_CHARS] or f"status {code}"
    if code == HTTPStatus.UNAUTHORIZED:
        rule, fix = "the API server does not know this user", "log in again, or check the user of the context"
        return UserError(field=f"context {call.context}", rule=rule, fix=fix)
    if code == HTTPStatus.FORBIDDEN:
        return _forbidden(call, message=message)
    if code == HTTPStatus.NOT_FOUND:
        return _not_found(call, kind=status.details.kind if status.details else None)
    causes = (status.details.causes if status.details else None) or []
    if code == HTTPStatus.UNPROCESSABLE_ENTITY and causes:
        return UserErrors([_invalid(call, cause) for cause in causes])
    if code == HTTPStatus.CONFLICT and causes:
        return UserErrors(list(_conflicts(call, causes)))
    is_for_now = code == HTTPStatus.TOO_MANY_REQUESTS or code >= HTTPStatus.INTERNAL_SERVER_ERROR
    refused = RefusedForNowError if is_for_now else UserError
    return refused(field=call.thing, rule=f"the API server refused to {call.verb} it ({code}): {message}")


def _text(line: bytes) -> str:
    return line.decode("utf-8", errors="replace")


def _no_exec(call: Call, *, code: int) -> UserError | UserErrors:
    """The error where no command was run; a handshake that is refused has no body."""
    if code in (HTTPStatus.NOT_FOUND, HTTPStatus.INTERNAL_SERVER_ERROR):  # so of a container that waits
        rule = f"runs no commands ({code}): the container is not there yet or no more, or its node does not answer"
        return UserError(field=call.thing, rule=rule, fix="see `streamrl status`")
    if code != HTTPStatus.FORBIDDEN:
        return refusal(call, code=code, body=b"")
    return UserError(
        field=f"context {call.context}",
        rule=f"its user may not run commands in pods of namespace {call.namespace}",
        fix="ask for a role with `create` and `get` of `pods/exec`",
    )


def _forbidden(call: Call, *, message: str) -> UserError:
    user = _USER.search(message)
    if "cannot" not in message or user is None:  # admission: quota, a namespace that ends
        return UserError(field=call.thing, rule=f"forbidden by the cluster: {message}")
    rule = f"user {user[1]} may not {call.verb} {call.resource} in {f'namespace {call.namespace}' if call.namespace else 'all namespaces'}"
    return UserError(field=f"context {call.context}", rule=rule, fix="ask for a role with this verb")


def _not_found(call: Call, *, kind: str | None) -> UserError:
    if kind == "namespaces":
        fix = f"make it: kubectl create namespace {call.namespace}"
        return UserError(field=f"namespace {call.namespace}", rule="does not exist", fix=fix)
    if kind is None and API_GROUP in call.plural:
        rule = f"is not known to the cluster of context {call.context}"
        return UserError(field=call.plural, rule=rule, fix=_INSTALL)
    fix = "`streamrl status` lists the jobs" if call.kind.plural == "rljobs" else ""
    return ObjectNotFoundError(field=call.thing, rule=f"is not in namespace {call.namespace}", fix=fix)


def _invalid(call: Call, cause: Cause) -> UserError:
    field = cause.field.removeprefix("<nil>") or call.thing
    rule = cause.message or cause.reason or "is not valid"
    return UserError(field=field, rule=rule.removeprefix("Invalid value: ").strip())


def _conflicts(call: Call, causes: list[Cause]) -> Iterator[UserError]:
    for cause in causes:
        owner = re.search(r'"([^"]*)"', cause.message)
        yield UserError(
            field=(cause.field or call.thing).removeprefix("."),
            rule=f"was set by {owner[1] if owner else 'somebody else'} since",
            fix="write that value into the file, or take the file's with --force",
        )


class RetryDeadline:
    """Time since the last answer."""

    def __init__(self, limit_s: float = LIMIT_S, *, clock: Callable[[], float] = monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._answered_s = clock()

    def answered(self) -> None:
        """There was an answer."""
        self._answered_s = self._clock()

    def bear(self, error: UnreachableError) -> None:
        """There was none; raises `error` if it has been so for too long."""
        if self._clock() - self._answered_s > self._limit_s:
            raise error
