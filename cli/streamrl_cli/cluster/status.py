"""`streamrl status [JOB]`: the jobs of a namespace as a table, or one job with conditions, pools, pods and events."""

import argparse
import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType

from streamrl import names
from streamrl.errors import EXIT_DONE, UserError
from streamrl_cli import console
from streamrl_cli.cluster.api import ApiClient, Object, add_connection, connect
from streamrl_cli.cluster.jobs import HEAD, INTERVAL_S, describe, events_of, row
from streamrl_cli.cluster.members import add_member_contexts, members_of, pods_of
from streamrl_cli.cluster.output import FORMS, columns, dump
from streamrl_operator.kube.kinds import GENERATOR_POOL, RLJOB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("job", nargs="?", metavar="JOB", help="name of a job; absent = all of the namespace")
    parser.add_argument("-o", "--output", choices=FORMS, help="the objects as they are")
    parser.add_argument("-w", "--watch", action="store_true", help="show it again when it changes, until Ctrl-C")
    add_member_contexts(parser)
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Show the jobs."""
    if args.watch and args.output:
        raise UserError(field="--watch", rule="goes without --output", fix="use kubectl get --watch for objects")
    if args.member_context and (args.output or not args.job):
        raise UserError(field="--member-context", rule="goes with a JOB, and without --output", fix="name a job")
    async with connect(args) as cluster:
        if args.output:
            job = await cluster.get(RLJOB, args.job) if args.job else await cluster.find(RLJOB)
            console.out(*dump(job, form=args.output).split("\n"))
        elif args.job:
            async with members_of(await cluster.get(RLJOB, args.job), args) as members:
                await _show_job(args.job, cluster=cluster, members=members, watch=args.watch)
        else:
            await _show_table(cluster=cluster, watch=args.watch)
    return EXIT_DONE


async def _show_table(*, cluster: ApiClient, watch: bool) -> None:
    """All jobs; then those that changed."""
    before: set[tuple[str, ...]] = set()
    while True:
        rows = [row(job, now=datetime.now(UTC)) for job in await cluster.find(RLJOB)]
        lines = columns(HEAD, rows)
        fresh = [line for line, cells in zip(lines[1:], rows, strict=True) if cells[:-1] not in before]  # age aside
        if fresh:
            console.out(*([] if before else lines[:1]), *fresh)
        elif not watch:
            console.out(f"no jobs in namespace {cluster.namespace} of context {cluster.context}")
        if not watch:
            return
        before = {cells[:-1] for cells in rows}
        await asyncio.sleep(INTERVAL_S)


async def _show_job(name: str, *, cluster: ApiClient, members: Mapping[str, ApiClient], watch: bool) -> None:
    """One job; again when anything of it changed."""
    before: list[str] = []
    while True:
        found = await look(name, cluster=cluster, members=members)
        versions = [one["metadata"]["resourceVersion"] for objects in found.values() for one in objects]
        if versions != before:
            job, now = found["job"][0], datetime.now(UTC)
            lines = describe(job, pools=found["pools"], pods=found["pods"], events=found["events"], now=now)
            console.out(*([""] if before else []), *lines)
        if not watch:
            return
        before = versions
        await asyncio.sleep(INTERVAL_S)


async def look(
    name: str, *, cluster: ApiClient, members: Mapping[str, ApiClient] = MappingProxyType({})
) -> dict[str, list[Object]]:
    """A job, and what belongs to it. `members`: as of `members_of`, whose pods are wanted too."""
    job = await cluster.get(RLJOB, name)
    return {
        "job": [job],
        "pools": await cluster.find(GENERATOR_POOL, labels=f"{names.LABEL_JOB}={name}"),
        "pods": await pods_of(job, home=cluster, members=members),
        "events": await events_of(job, cluster=cluster),
    }
