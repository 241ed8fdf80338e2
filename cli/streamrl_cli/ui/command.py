"""`streamrl ui RUN|FOLDER`: pages about a run, or about all runs in a folder, also while they go on; `streamrl ui --cluster`: about the
jobs of a cluster. Read-only.

The line that it prints has a link with the token of this start in it: open that one. Without the token nothing is shown, since
every user of this machine can reach its loopback address. `--token-file` names a file with a token that stays.
"""

import argparse
import asyncio
import importlib.util
import ipaddress
import secrets
import signal
import stat
from pathlib import Path
from typing import Any

from streamrl.errors import EXIT_DONE, UserError
from streamrl.files import read_text
from streamrl_cli import console
from streamrl_cli.cluster.api import add_connection, connect
from streamrl_cli.cluster.members import add_member_contexts, members_by_name

_VIEWERS_OF_A_PEER = 128
"""Open connections of one address, which may be a proxy's: each page that is looked at keeps one."""
_LEAST_TOKEN_CHARS = 16
_MOST_TOKEN_BYTES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl ui`."""
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="RUN|FOLDER", help="a run folder, or a folder that has some"
    )
    parser.add_argument("--cluster", action="store_true", help="show the jobs of a cluster instead")
    parser.add_argument("--port", type=int, default=8265, help="default: 8265; 0: any free one")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind (default: loopback); another one needs --token-file"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds the token, of at least 16 characters, and not everybody can read it; else each start makes one",
    )
    parser.add_argument(
        "--name", action="append", default=[], metavar="NAME", help="a name by which browsers may call the server"
    )
    add_member_contexts(parser)
    add_connection(parser, several=True)
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="with --cluster: jobs of all namespaces")


async def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    for module in ("starlette", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise UserError(field="streamrl ui", rule=f"needs {module}", fix="pip install 'streamrl[ui]'")
    _check(args)
    token = _token(args.token_file, host=args.host)
    names = frozenset(name.lower() for name in (*args.name, args.host))
    if args.cluster:
        await _serve_cluster(args, token=token, names=names)
    else:
        from streamrl_cli.ui.pages import application

        await _serve(application(args.folder, token=token, names=names), args=args, token=token)
    return EXIT_DONE


def _check(args: argparse.Namespace) -> None:
    if args.cluster == (args.folder is not None):
        rule = "needs a folder of runs, or --cluster, and not both"
        raise UserError(field="streamrl ui", rule=rule, fix="streamrl ui runs, or streamrl ui --cluster")
    for name in ("context", "namespace", "kubeconfig", "all_namespaces", "member_context"):
        if getattr(args, name) and not args.cluster:
            raise UserError(field=f"--{name.replace('_', '-')}", rule="goes with --cluster", fix="add --cluster")
    if args.namespace and args.all_namespaces:
        raise UserError(field="--namespace", rule="goes without --all-namespaces", fix="leave one out")


async def _serve_cluster(args: argparse.Namespace, *, token: str, names: frozenset[str]) -> None:
    from streamrl_cli.ui.cluster_jobs import ClusterJobs
    from streamrl_cli.ui.job_pages import jobs_application

    home = argparse.Namespace(context=args.context, kubeconfig=args.kubeconfig, namespace=None)
    async with connect(home) as cluster, members_by_name(args) as members:
        namespaces = [""] if args.all_namespaces else args.namespace or [cluster.namespace]
        jobs = ClusterJobs(cluster, namespaces=namespaces, members=members)
        try:
            await _serve(jobs_application(jobs, token=token, names=names), args=args, token=token)
        finally:
            await jobs.close()


async def _serve(app: Any, *, args: argparse.Namespace, token: str) -> None:  # noqa: ANN401 - an ASGI application
    """Until a signal."""
    from streamrl_pages.server import PageServer
    from streamrl_pages.website import TIMEOUT_S

    server = PageServer(app, timeout_s=TIMEOUT_S, of_a_peer=_VIEWERS_OF_A_PEER)
    port = await server.start(host=args.host, port=args.port, field="--port")
    host = f"[{args.host}]" if ":" in args.host else args.host
    console.out(f"http://{host}:{port}/" + ("" if args.token_file else f"#token={token}"))
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    try:
        await ended.wait()
    finally:
        await server.close()


def _token(file: Path | None, *, host: str) -> str:
    if file is None:
        if not _is_loopback(host):
            raise UserError(field="--host", rule="needs --token-file where it is not loopback", got=host)
        return secrets.token_urlsafe(24)
    token = read_text(file, most_bytes=_MOST_TOKEN_BYTES).strip()
    if len(token) < _LEAST_TOKEN_CHARS or not (token.isascii() and token.isprintable()):
        rule = f"must hold a token of at least {_LEAST_TOKEN_CHARS} printable ASCII characters"
        raise UserError(field="--token-file", rule=rule, fix=f"(umask 077; openssl rand -base64 24 > {file})")
    if file.stat().st_mode & stat.S_IRWXO:
        raise UserError(field="--token-file", rule="must not be for everybody to read", fix=f"chmod o= {file}")
    return token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
