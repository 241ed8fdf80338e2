"""`streamrl logs JOB`: what the job's pods say, each line with pod and container before it.

Loop of `--follow`: every few seconds the pods are listed again; each container that is new (or was started again) gets a reader of its own.
Ends when no reader is left and the job has ended, or at Ctrl-C.
"""

import argparse
import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from streamrl import names
from streamrl.errors import EXIT_DONE, UserError
from streamrl_cli import console
from streamrl_cli.cluster.api import (
    ApiClient,
    Object,
    ObjectNotFoundError,
    RetryDeadline,
    UnreachableError,
    add_connection,
    connect,
)
from streamrl_cli.cluster.jobs import ENDED, INTERVAL_S, SUSPENDED, state
from streamrl_operator.kube.kinds import POD, RLJOB
from streamrl_operator.planning.pods import containers as container_statuses

CONTAINERS = {
    "scheduler": names.CONTAINER_SCHEDULER,
    "trainer": names.CONTAINER_TRAINER,
    "prepare": names.CONTAINER_PREPARE,
    "tasks": names.CONTAINER_TASKS,
    "generators": names.CONTAINER_GENERATOR,
}
"""Role as people name it -> container."""
_DEFAULT_TAIL = 20
"""Lines of each container where several are shown and nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One container's log."""

    pod: str
    container: str
    life: str
    """Changes when the container or its pod is made again."""
    prefix: str
    """Before its lines."""
    has_log: bool = field(compare=False)
    """It runs, or has run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument(
        "--role", action="append", choices=tuple(CONTAINERS), help="only of this role; can be given several times"
    )
    parser.add_argument("--pool", metavar="NAME", help="only the generators of this pool")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on, with pods that come later, until the job ends"
    )
    parser.add_argument(
        "--tail", type=int, metavar="N", help=f"last N lines of each (default: {_DEFAULT_TAIL}; all of a single one)"
    )
    parser.add_argument("-p", "--previous", action="store_true", help="of the life before the last restart")
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Print the logs."""
    if args.follow and args.previous:
        raise UserError(field="--previous", rule="has ended: it cannot be followed", fix="leave out --follow")
    if args.tail is not None and args.tail < 0:
        raise UserError(field="--tail", rule="must be at least 0", got=args.tail)
    async with connect(args) as cluster:
        await cluster.get(RLJOB, args.job)  # says so if there is none
        if args.follow:
            await _LogFollower(args, cluster=cluster).to_the_end()
            return EXIT_DONE
        found = [source for source in await _sources(args, cluster=cluster) if source.has_log]
        if not found:
            raise UserError(
                field=args.job, rule="has no pods with such logs now", fix=f"see `streamrl status {args.job}`"
            )
        query = _query(args, several=len(found) > 1)
        for source in found:
            await _print(source, query, cluster=cluster)
    return EXIT_DONE


def _query(args: argparse.Namespace, *, several: bool) -> dict[str, str]:
    tail = args.tail if args.tail is not None else (_DEFAULT_TAIL if several else None)
    query = {} if tail is None else {"tailLines": str(tail)}
    return query | ({"previous": "true"} if args.previous else {})


async def _sources(args: argparse.Namespace, *, cluster: ApiClient) -> list[LogSource]:
    labels = f"{names.LABEL_JOB}={args.job}"
    if args.pool:
        labels += f",{names.LABEL_POOL}={args.pool}"
    roles = args.role or (["generators"] if args.pool else list(CONTAINERS))
    return list(sources(await cluster.find(POD, labels=labels), [CONTAINERS[role] for role in roles]))


def sources(pods: Sequence[Object], containers: Sequence[str]) -> Iterator[LogSource]:
    """The logs of these containers, pod by pod."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        spec = pod["spec"]
        present = [one["name"] for one in (*spec.get("initContainers", []), *spec["containers"])]
        for container in present:
            if container in containers:
                yield _source(pod, container)


def _source(pod: Object, container: str) -> LogSource:
    name = pod["metadata"]["name"]
    status = next((one for one in container_statuses(pod) if one["name"] == container), {})
    restarts = status.get("restartCount", 0)
    return LogSource(
        pod=name,
        container=container,
        life=f"{pod['metadata']['uid']}/{restarts}",
        has_log=bool(restarts) or any(kind in status.get("state", {}) for kind in ("running", "terminated")),
        prefix=name if container == names.CONTAINER_GENERATOR else f"{name}/{container}",
    )


async def _print(source: LogSource, query: Mapping[str, str], *, cluster: ApiClient) -> None:
    try:
        async for line in cluster.log(source.pod, source.container, query):
            console.out(f"[{source.prefix}] {line}")
    except ObjectNotFoundError:
        pass  # the pod went away meanwhile
    except UnreachableError:
        raise
    except UserError as error:
        console.err(f"[{source.prefix}] {error}")  # the others may still be had


class _LogFollower:
    """Readers of all containers of the job, of those that come later too."""

    def __init__(self, args: argparse.Namespace, *, cluster: ApiClient) -> None:
        self.args = args
        self.cluster = cluster
        self.patience = RetryDeadline()
        self.readers: dict[LogSource, asyncio.Task[None]] = {}
        self.broken: dict[LogSource, float] = {}
        """When a reader lost the API server, by a monotonic clock."""
        self.is_first = True

    async def to_the_end(self) -> None:
        try:
            while True:
                if await self._look():
                    return
                await asyncio.sleep(INTERVAL_S)
        finally:
            for reader in self.readers.values():
                reader.cancel()
            await asyncio.gather(*self.readers.values(), return_exceptions=True)

    async def _look(self) -> bool:
        """Begin to read what is new; whether all has been read and the job has ended."""
        try:
            found = await _sources(self.args, cluster=self.cluster)
            has_ended = await self._has_ended()
        except UnreachableError as error:
            self.patience.bear(error)
            return False
        self.patience.answered()
        for source in found:
            if source.has_log and source not in self.readers:
                self._read(source, several=len(found) > 1)
        self.is_first = False
        return has_ended and all(reader.done() for reader in self.readers.values())

    def _read(self, source: LogSource, *, several: bool) -> None:
        query = {"follow": "true"}
        if source in self.broken:
            query["sinceSeconds"] = str(int(monotonic() - self.broken.pop(source)) + 1)
        elif self.is_first:  # what comes later is shown from its beginning
            query |= _query(self.args, several=several)
        self.readers[source] = asyncio.create_task(self._reader(source, query), name=f"log of {source.prefix}")

    async def _reader(self, source: LogSource, query: Mapping[str, str]) -> None:
        try:
            await _print(source, query, cluster=self.cluster)
        except UnreachableError:
            self.broken[source] = monotonic()
            del self.readers[source]  # read again from here once the API server is back

    async def _has_ended(self) -> bool:
        try:
            return state(await self.cluster.get(RLJOB, self.args.job)) in (*ENDED, SUSPENDED)
        except ObjectNotFoundError:
            return True
