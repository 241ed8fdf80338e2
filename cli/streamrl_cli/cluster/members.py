"""`streamrl cluster join|list|leave`: member clusters of the home cluster, in which pools of jobs may lie.

join    reads the token of the account that the chart `streamrl-member` made in the member, and writes at home
        the Secret with the kubeconfig and the RLCluster. Nothing is written in the member.
list    the RLClusters with what the operator says of them
leave   deletes the RLCluster; it goes when no job is in it any more, and its Secret can be deleted then

Commands that read pods take `--member-context`: what a job has in a member is read there, in the name of the person.
"""

import argparse
import base64
import binascii
import copy
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from streamrl import API_VERSION, names
from streamrl.clusters import RLClusterSpec
from streamrl.errors import EXIT_DONE, UserError
from streamrl.spec.parse import parse_document
from streamrl_cli import console
from streamrl_cli.cluster.api import ApiClient, Object, ObjectNotFoundError, add_connection, connect
from streamrl_cli.cluster.output import age, columns
from streamrl_operator.kube.kinds import CLUSTER, POD, SECRET

_HEAD = ("NAME", "CONNECTED", "AUTHORIZED", "NAMESPACES", "AGE", "REASON")
_OPERATOR_NAMESPACE = "streamrl-system"
_ACCOUNT = "streamrl-member/streamrl-home"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="join|list|leave")
    join = actions.add_parser("join", help="let pools of jobs lie in another cluster")
    join.add_argument("name", metavar="NAME", help="of the RLCluster, as clusterName of pools gives it")
    join.add_argument("--member-context", required=True, metavar="NAME", help="context of the member in the kubeconfig")
    join.add_argument(
        "--map",
        required=True,
        action="append",
        metavar="HUB=MEMBER",
        help="a namespace of jobs, and the one for their pools in the member; may be given again",
    )
    ways = join.add_mutually_exclusive_group(required=True)
    ways.add_argument("--node-port", metavar="HOST", help="generators reach schedulers at node ports of this host")
    ways.add_argument("--load-balancer", action="store_true", help="… by a load balancer for each job")
    ways.add_argument("--address", metavar="HOST:PORT[:PORT]", help="… at ports of the scheduler and of the weights")
    ways.add_argument(
        "--gateway",
        metavar="NAMESPACE/NAME=HOST:PORT",
        help="… through a Gateway that passes TLS, and is there for them",
    )
    join.add_argument(
        "--trainers",
        nargs="?",
        const="",
        metavar="HOST",
        help="trainers of jobs may lie there too; pools elsewhere reach them at node ports of HOST (absent: all pools lie there)",
    )
    join.add_argument(
        "--server", metavar="URL", help="the member's API server as the operator sees it (default: the context's)"
    )
    join.add_argument(
        "--account", default=_ACCOUNT, metavar="NAMESPACE/NAME", help=f"account in the member (default: {_ACCOUNT})"
    )
    actions.add_parser("list", help="show the member clusters")
    leave = actions.add_parser("leave", help="let no more pools lie in a member")
    leave.add_argument("name", metavar="NAME", help="of the RLCluster")
    for action in actions.choices.values():
        action.add_argument(
            "--operator-namespace",
            default=_OPERATOR_NAMESPACE,
            metavar="NAME",
            help=f"namespace of the operator (default: {_OPERATOR_NAMESPACE})",
        )
        add_connection(action)


def add_member_contexts(parser: argparse.ArgumentParser) -> None:
    """The argument that `members_of` reads."""
    parser.add_argument(
        "--member-context",
        action="append",
        default=[],
        metavar="[CLUSTER=]CONTEXT",
        help="context of the kubeconfig for a member cluster that pools of the job are in; may be given again",
    )


@asynccontextmanager
async def members_of(job: Object, args: argparse.Namespace) -> AsyncIterator[dict[str, ApiClient]]:
    """Cluster -> the job's namespace there, of the members whose contexts are given."""
    entries = {one["name"]: one["namespace"] for one in job.get("status", {}).get("clusters", ())}
    contexts: dict[str, str] = {}
    for given in args.member_context:
        name, _, context = given.rpartition("=")
        if not name and len(entries) == 1:
            (name,) = entries
        if name not in entries:
            known = f"must name a member cluster that the job is in ({', '.join(entries) or 'it is in none'})"
            raise UserError(field="--member-context", rule=known, got=given, fix="write CLUSTER=CONTEXT")
        contexts[name] = context
    async with _connected(contexts, args) as members:
        yield {name: member.within(entries[name]) for name, member in members.items()}


@asynccontextmanager
async def members_by_name(args: argparse.Namespace) -> AsyncIterator[dict[str, ApiClient]]:
    """Cluster -> the member, of those whose contexts are given with their names: for commands about many jobs."""
    contexts: dict[str, str] = {}
    for given in args.member_context:
        name, _, context = given.rpartition("=")
        if not name:
            rule = "needs the name of the cluster"
            raise UserError(field="--member-context", rule=rule, got=given, fix="write CLUSTER=CONTEXT")
        contexts[name] = context
    async with _connected(contexts, args) as members:
        yield members


@asynccontextmanager
async def _connected(contexts: Mapping[str, str], args: argparse.Namespace) -> AsyncIterator[dict[str, ApiClient]]:
    found: dict[str, ApiClient] = {}
    async with AsyncExitStack() as stack:
        for name, context in contexts.items():
            there = copy.copy(args)
            there.context, there.namespace = context, None
            found[name] = await stack.enter_async_context(connect(there))
        yield found


async def pods_of(
    job: Object, *, home: ApiClient | None, members: Mapping[str, ApiClient], labels: str = ""
) -> list[Object]:
    """At home, if it is given, and in these members; of a job of another home by this name none."""
    meta, found = job["metadata"], []
    mine = ",".join(filter(None, (f"{names.LABEL_JOB}={meta['name']}", labels)))
    if home is not None:
        found += await home.find(POD, labels=f"{mine},!{names.LABEL_CLUSTER}")
    for cluster, member in members.items():
        there = f"{mine},{names.LABEL_JOB_UID}={meta['uid']},{names.LABEL_CLUSTER}={cluster}"
        found += await member.find(POD, labels=there)
    return found


async def run(args: argparse.Namespace) -> int:
    """Do what is asked."""
    async with connect(args) as home:
        if args.action == "list":
            await _list(home.within(""))
        elif args.action == "leave":
            await _leave(args.name, home=home.within(""))
        else:
            await _join(args, home=home)
    return EXIT_DONE


async def _list(home: ApiClient) -> None:
    found = await home.find(CLUSTER)
    if not found:
        console.out(f"no member clusters are known to context {home.context}")
        return
    console.out(*columns(_HEAD, [_row(one) for one in found]))


def _row(cluster: Object) -> tuple[str, ...]:
    said = {one["type"]: one for one in cluster.get("status", {}).get("conditions", ())}
    connected, authorized = said.get("Connected", {}), said.get("Authorized", {})
    mapped = ",".join(f"{one['hub']}={one['member']}" for one in cluster["spec"]["namespaces"])
    reason = connected.get("reason", "")
    why = reason if connected.get("status") != "True" else authorized.get("message", "")
    since = age(cluster["metadata"].get("creationTimestamp"), now=datetime.now(UTC))
    return (
        cluster["metadata"]["name"],
        connected.get("status", "Unknown"),
        authorized.get("status", "Unknown"),
        mapped,
        since,
        why,
    )


async def _leave(name: str, *, home: ApiClient) -> None:
    await home.delete(await home.get(CLUSTER, name), CLUSTER)
    console.out(f"rlcluster/{name} goes when no job is in it any more; streamrl cluster list shows what it waits for")


async def _join(args: argparse.Namespace, *, home: ApiClient) -> None:
    spec = _spec(args)
    parse_document(spec, model=RLClusterSpec, rule="must be a mapping")
    there = copy.copy(args)
    there.context, there.namespace = args.member_context, None
    async with connect(there) as member:
        text = await _kubeconfig(member, account=args.account, server=args.server)
    secret = {
        "apiVersion": SECRET.api_version,
        "kind": SECRET.kind,
        "metadata": {"name": _secret_name(args.name), "namespace": args.operator_namespace},
        "data": {"kubeconfig": base64.b64encode(text.encode()).decode()},
    }
    await home.within(args.operator_namespace).apply(SECRET, secret)
    cluster = {"apiVersion": API_VERSION, "kind": CLUSTER.kind, "metadata": {"name": args.name}, "spec": spec}
    await home.within("").apply(CLUSTER, cluster)
    console.out(f"rlcluster/{args.name} is joined; streamrl cluster list shows whether the operator reaches it")


def _spec(args: argparse.Namespace) -> dict[str, Any]:
    pairs = [pair.partition("=") for pair in args.map]
    if any(not (hub and member) for hub, _, member in pairs):
        raise UserError(field="--map", rule="must be HUB=MEMBER", got=" ".join(args.map))
    spec = {
        "source": {"kubeconfigSecretName": _secret_name(args.name)},
        "namespaces": [{"hub": hub, "member": member} for hub, _, member in pairs],
        "exposure": _exposure(args),
    }
    if args.trainers is not None:
        spec["trainers"] = {"exposure": {"nodePort": {"host": args.trainers}}} if args.trainers else {}
    return spec


def _exposure(args: argparse.Namespace) -> dict[str, Any]:
    if args.node_port:
        return {"nodePort": {"host": args.node_port}}
    if args.load_balancer:
        return {"loadBalancer": {}}
    if args.gateway:
        return {"gateway": _gateway(args.gateway)}
    host, *ports = args.address.split(":")
    if not host or not 1 <= len(ports) <= 2 or not all(port.isdecimal() for port in ports):  # noqa: PLR2004 - as it is written
        raise UserError(field="--address", rule="must be HOST:PORT or HOST:PORT:PORT", got=args.address)
    return {"address": {"host": host, "schedulerPort": int(ports[0]), "weightsPort": int(ports[-1])}}


def _gateway(text: str) -> dict[str, Any]:
    gateway, _, address = text.partition("=")
    namespace, _, name = gateway.partition("/")
    host, _, port = address.rpartition(":")
    if not (namespace and name and host and port.isdecimal()):
        raise UserError(field="--gateway", rule="must be NAMESPACE/NAME=HOST:PORT", got=text)
    return {"namespace": namespace, "name": name, "host": host, "port": int(port)}


def _secret_name(cluster: str) -> str:
    return f"streamrl-cluster-{cluster}"


async def _kubeconfig(member: ApiClient, *, account: str, server: str | None) -> str:
    """Of the account in the member, with nothing in it but address, authority and token."""
    namespace, _, name = account.partition("/")
    try:
        found = await member.within(namespace).get(SECRET, f"{name}-token")
    except ObjectNotFoundError:
        fix = f"helm install {namespace} helm/streamrl-member --namespace {namespace} --create-namespace --set-json 'namespaces=[…]'"
        raise UserError(field=f"Secret {namespace}/{name}-token", rule="must be in the member", fix=fix) from None
    data = found.get("data") or {}
    try:
        token = base64.b64decode(data["token"], validate=True).decode()
    except (KeyError, ValueError, binascii.Error):
        raise UserError(field=f"Secret {namespace}/{name}-token", rule="has no token yet", fix="try again") from None
    cluster = {"server": server or member.access.server, "certificate-authority-data": data.get("ca.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "member",
        "clusters": [{"name": "member", "cluster": {key: value for key, value in cluster.items() if value}}],
        "users": [{"name": "member", "user": {"token": token}}],
        "contexts": [{"name": "member", "context": {"cluster": "member", "user": "member"}}],
    }
    return json.dumps(config)
