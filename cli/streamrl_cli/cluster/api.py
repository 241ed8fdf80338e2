"""The commands' door to an API server: the user's context, plain objects in and out, refusals as one line.

Owns requests as a person makes them: server-side apply that asks before it takes fields from others, patches, logs. Credentials are read by
the operator's `kube.access`; its client speaks as the operator does (by force, without the API server's causes), so there is one here.
Every request has a deadline; only a followed log has none between its lines.
"""

import argparse
import errno
import importlib
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from streamrl.errors import UserError
from streamrl_cli.cluster.kubeconfig import choose
from streamrl_cli.cluster.refusals import Call, refusal
from streamrl_operator.kube.kinds import Kind
from streamrl_operator.kube.lines import split_lines

if TYPE_CHECKING:
    import aiohttp

    from streamrl_operator.kube.access import Access

MANAGER = "streamrl-cli"
"""Field manager of all that the commands write."""
REQUEST_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 10.0
_APPLY, _MERGE, _JSON_PATCH = (
    "application/apply-patch+yaml",
    "application/merge-patch+json",
    "application/json-patch+json",
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
Object = dict[str, Any]


class UnreachableError(UserError):
    """The API server gave no answer."""


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which cluster and namespace."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: the current one)")
    group.add_argument("-n", "--namespace", metavar="NAME", help="namespace (default: the context's)")
    group.add_argument(
        "--kubeconfig", type=Path, metavar="FILE", help="kubeconfig (default: $KUBECONFIG, else ~/.kube/config)"
    )


@asynccontextmanager
async def connect(args: argparse.Namespace) -> AsyncIterator["Cluster"]:
    """The cluster that the arguments of `add_connection` mean.

    Raises:
        UserError: the client is not installed, or there is no such context.
    """
    try:
        aiohttp = importlib.import_module("aiohttp")
        access_module = importlib.import_module("streamrl_operator.kube.access")
    except ModuleNotFoundError as error:
        rule = f"commands over clusters need the package {error.name}, which is not installed"
        raise UserError(field="streamrl", rule=rule, fix="pip install 'streamrl[operator]'") from None
    chosen = choose(kubeconfig=args.kubeconfig, context=args.context)
    access = access_module.from_kubeconfig(chosen.text, source=chosen.source, context=chosen.context)
    connector = aiohttp.TCPConnector(ssl=access.tls or False)
    # As kubectl: a proxy of the environment, but never to this machine.
    trust_env = urlsplit(access.server).hostname not in _LOOPBACK
    async with aiohttp.ClientSession(connector=connector, trust_env=trust_env) as session:
        yield Cluster(access, session=session, context=chosen.context, namespace=args.namespace or access.namespace)


class Cluster:
    """One API server, in the name of a person."""

    def __init__(self, access: "Access", *, session: "aiohttp.ClientSession", context: str, namespace: str) -> None:
        self.access = access
        self.context = context
        self.namespace = namespace
        """Where objects are that say nothing else."""
        self._session = session

    async def get(self, kind: Kind, name: str) -> Object:
        """One object.

        Raises:
            NotFoundError: it is not there.
        """
        return await self._ask(self._call("get", kind, name))

    async def find(self, kind: Kind, *, labels: str = "", fields: str = "") -> list[Object]:
        """All objects that the selectors take."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        body = await self._ask(self._call("list", kind), query={key: value for key, value in query.items() if value})
        return [{"apiVersion": kind.api_version, "kind": kind.kind} | item for item in body["items"]]

    async def apply(self, kind: Kind, obj: Mapping[str, Any], *, force: bool = False, dry_run: bool = False) -> Object:
        """Server-side apply; fields that somebody else has set since are refused unless by `force`."""
        query = {"fieldManager": MANAGER, "force": str(force).lower(), "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        call = self._call("patch", kind, obj["metadata"]["name"])
        return await self._ask(call, query=query, body=obj, content_type=_APPLY)

    async def merge(self, kind: Kind, name: str, change: Mapping[str, Any], *, subresource: str = "") -> Object:
        """JSON merge patch."""
        call = self._call("patch", kind, name, subresource)
        return await self._ask(call, query={"fieldManager": MANAGER}, body=change, content_type=_MERGE)

    async def patch(self, kind: Kind, name: str, changes: Sequence[Mapping[str, Any]]) -> Object:
        """JSON patch: with a `test` that does not hold nothing is done."""
        call = self._call("patch", kind, name)
        return await self._ask(call, query={"fieldManager": MANAGER}, body=changes, content_type=_JSON_PATCH)

    async def delete(self, obj: Mapping[str, Any], kind: Kind) -> None:
        """Delete this very object: one that has come in its place stays."""
        meta = obj["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": meta["uid"]}}
        await self._ask(self._call("delete", kind, meta["name"]), body=body)

    async def log(self, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        """Lines of a container's log; with `follow` in `query` until the container ends."""
        from streamrl_operator.kube.kinds import POD

        call = self._call("get", POD, pod, "log")
        async with self._answer(call, query={"container": container, **query}, total_s=None) as response:
            async for line in split_lines(response.content.iter_any()):
                yield line.decode("utf-8", errors="replace")

    def _call(self, verb: str, kind: Kind, name: str = "", subresource: str = "") -> Call:
        return Call(
            verb=verb, kind=kind, name=name, subresource=subresource, namespace=self.namespace, context=self.context
        )

    async def _ask(self, call: Call, **request: Any) -> Object:  # noqa: ANN401 - as `_answer` takes it
        async with self._answer(call, **request) as response:
            answer: Object = json.loads(await response.read())
            return answer

    @asynccontextmanager
    async def _answer(
        self,
        call: Call,
        *,
        query: Mapping[str, str] | None = None,
        body: object = None,
        content_type: str = "application/json",
        total_s: float | None = REQUEST_TIMEOUT_S,
    ) -> AsyncIterator["aiohttp.ClientResponse"]:
        import aiohttp

        path = call.kind.path(call.namespace, call.name or None, call.subresource or None)
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_TIMEOUT_S)
        headers = {"Content-Type": content_type, "User-Agent": MANAGER}
        try:
            headers |= await self.access.headers(now_s=monotonic())
            async with self._session.request(
                _METHODS[call.verb],
                self.access.server + path,
                params=query,
                data=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout,
            ) as response:
                if not response.ok:
                    raise refusal(call, code=response.status, body=await response.text())
                yield response
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


_METHODS = {"get": "GET", "list": "GET", "patch": "PATCH", "delete": "DELETE"}


def _reason(error: BaseException) -> str:
    """The last words of an error of the network: `Connection refused`."""
    inner = getattr(error, "os_error", None) or error
    if isinstance(inner, OSError) and inner.errno is not None and inner.errno in errno.errorcode:
        return os.strerror(inner.errno)  # asyncio puts the address where the words should be
    return " ".join(str(inner).split()) or type(error).__name__
