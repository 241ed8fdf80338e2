"""`streamrl logs JOB`: what the job's pods say, each line with pod and container before it.

Loop of `--follow`, one for home and one for each member: every few seconds the pods are listed again; each container that is new (or was
started again) gets a reader of its own. Ends when no reader is left and the job has ended, or at Ctrl-C. A member that cannot be reached, or
refuses, is named once, and its pods are read on when it is back; home is waited for as long as by other commands. A log that is refused is
named once too and asked for again; after the end of the job only once more.
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
    RefusedForNowError,
    RetryDeadline,
    UnreachableError,
    add_connection,
    connect,
)
from streamrl_cli.cluster.jobs import ENDED, INTERVAL_S, state
from streamrl_cli.cluster.members import add_member_contexts, members_of, pods_of
from streamrl_operator.kube.kinds import RLJOB
from streamrl_operator.planning.conditions import SUSPENDED
from streamrl_operator.planning.members import clusters_by_pool
from streamrl_operator.planning.pods import containers as container_statuses
from streamrl_operator.planning.values import trainer_cluster

CONTAINERS = {
    "scheduler": names.CONTAINER_SCHEDULER,
    "trainer": names.CONTAINER_TRAINER,
    "prepare": names.CONTAINER_PREPARE,
    "tasks": names.CONTAINER_TASKS,
    "generators": names.CONTAINER_GENERATOR,
    "agents": names.CONTAINER_AGENTS,
    "agent-links": names.CONTAINER_AGENT_LINK,
}
"""Role as people name it -> container."""
HOME = ""
"""Cluster of what is in no member."""
_DOUBLED_S = 2
"""Shown again behind a cut: a line comes later than it is written, and parts of a second are cut off."""
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
    cluster: str = ""
    """The member that it is in; empty: at home."""


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
    add_member_contexts(parser)
    add_connection(parser)


async def run(args: argparse.Namespace) -> int:
    """Print the logs."""
    if args.follow and args.previous:
        raise UserError(field="--previous", rule="has ended: it cannot be followed", fix="leave out --follow")
    if args.tail is not None and args.tail < 0:
        raise UserError(field="--tail", rule="must be at least 0", got=args.tail)
    async with connect(args) as cluster:
        job = await cluster.get(RLJOB, args.job)  # says so if there is none
        async with members_of(job, args) as members:
            places = LogPlaces(args=args, job=job, home=cluster, members=members)
            await _show(args, places)
    return EXIT_DONE


async def _show(args: argparse.Namespace, places: "LogPlaces") -> None:
    elsewhere = places.elsewhere()
    if elsewhere and args.pool:
        raise elsewhere[0]
    if args.follow:
        console.err(*map(str, elsewhere))
        await _LogFollower(args, places).to_the_end()
        return
    found = [source for source in await places.sources(HOME) if source.has_log]
    missing = [*map(str, elsewhere)]
    for member in places.members:
        try:
            found += [source for source in await places.sources(member) if source.has_log]
        except UserError as error:
            missing.append(_missing(member, error))
    console.err(*missing)
    if not found:
        raise UserError(field=args.job, rule="has no pods with such logs now", fix=f"see `streamrl status {args.job}`")
    query = _query(args, several=len(found) > 1)
    for source in found:
        await _print(source, query, cluster=places.of(source))


def _missing(member: str, error: UserError) -> str:
    return f"member cluster {member} cannot be reached, its pods are missing here: {error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPlaces:
    """Where the job's pods are."""

    args: argparse.Namespace
    job: Object
    home: ApiClient
    members: Mapping[str, ApiClient]

    def of(self, source: LogSource) -> ApiClient:
        """The API server that has a log."""
        return self.members[source.cluster] if source.cluster else self.home

    async def sources(self, *clusters: str) -> list[LogSource]:
        """All that is asked for in these clusters."""
        labels = f"{names.LABEL_POOL}={self.args.pool}" if self.args.pool else ""
        found = await pods_of(
            self.job,
            home=self.home if HOME in clusters else None,
            members={name: self.members[name] for name in clusters if name != HOME},
            labels=labels,
        )
        return list(sources(found, [CONTAINERS[role] for role in self._roles()]))

    def elsewhere(self) -> list[UserError]:
        """For each part of the job that is asked for and in a member whose context is not given."""
        roles, at = set(self._roles()), trainer_cluster(self.job)
        far = clusters_by_pool(self.job).items() if "generators" in roles else ()
        parts = {f"pool {pool}": cluster for pool, cluster in far if self.args.pool in (None, pool)}
        parts |= {"trainer": at} if at and not self.args.pool and roles - {"generators"} else {}
        return [
            UserError(
                field=part,
                rule=f"has its pods in member cluster {cluster}",
                fix=f"give --member-context {cluster}=CONTEXT, a context of the kubeconfig for it",
            )
            for part, cluster in parts.items()
            if cluster not in self.members
        ]

    def _roles(self) -> Sequence[str]:
        of_pool = ["agents", "agent-links"] if self.args.pool == names.AGENTS else ["generators"]
        return self.args.role or (of_pool if self.args.pool else list(CONTAINERS))


def _query(args: argparse.Namespace, *, several: bool) -> dict[str, str]:
    tail = args.tail if args.tail is not None else (_DEFAULT_TAIL if several else None)
    query = {} if tail is None else {"tailLines": str(tail)}
    return query | ({"previous": "true"} if args.previous else {})


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
        cluster=pod["metadata"].get("labels", {}).get(names.LABEL_CLUSTER, ""),
    )


async def _print(source: LogSource, query: Mapping[str, str], *, cluster: ApiClient) -> None:
    try:
        async for line in cluster.log(source.pod, source.container, query):
            console.out(f"[{source.prefix}] {line}")
    except ObjectNotFoundError:
        pass  # the pod went away meanwhile
    except UserError as error:
        if not _is_answer(error):
            raise
        console.err(f"[{source.prefix}] {error}")  # the others may still be had


def _is_answer(error: UserError) -> bool:
    """Whether the API server refused; else other questions have no answer either."""
    return isinstance(error, RefusedForNowError) or not isinstance(error, UnreachableError)


class _LogFollower:
    """Readers of all containers of the job, of those that come later too. Each cluster is looked at by itself: one that is lost holds up no other."""

    def __init__(self, args: argparse.Namespace, places: LogPlaces) -> None:
        self.args = args
        self.places = places
        self.patience = RetryDeadline()
        """With home; the others are waited for as long as the job lasts."""
        self.readers: dict[LogSource, asyncio.Task[None]] = {}
        self.queries: dict[LogSource, dict[str, str]] = {}
        """With which each log was asked for at first."""
        self.heard_s: dict[LogSource, float] = {}
        """When its last line came, by a monotonic clock: a cut is noticed much later."""
        self.refused: set[LogSource] = set()
        """Logs of which it is told that they are refused."""
        self.seen: set[str] = set()
        """Clusters that have answered."""
        self.lost: set[str] = set()
        """Members of which it is told that they are missing."""
        self.has_ended = False
        """The job, by what home has said."""

    async def to_the_end(self) -> None:
        loops = [
            asyncio.create_task(self._follow(cluster), name=f"follow {cluster or 'home'}")
            for cluster in (HOME, *self.places.members)
        ]
        try:
            await asyncio.gather(*loops)
        finally:
            tasks = [*loops, *self.readers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, cluster: str) -> None:
        while True:
            if await self._look(cluster):
                return
            await asyncio.sleep(INTERVAL_S)

    async def _look(self, cluster: str) -> bool:
        """Begin to read what is new there; whether all has been read, or is missing, and the job has ended."""
        had_ended = self.has_ended
        try:
            found = await self.places.sources(cluster)
            if cluster == HOME:
                had_ended = self.has_ended = await self._has_ended()
        except UserError as error:
            self._lose(cluster, error)
            return had_ended and cluster != HOME
        self._answered(cluster)
        for source in found:
            if source.has_log and source not in self.readers:
                self._read(source, several=len(found) > 1 or bool(self.places.members))
        self.seen.add(cluster)
        return had_ended and all(reader.done() for source, reader in self.readers.items() if source.cluster == cluster)

    def _lose(self, cluster: str, error: UserError) -> None:
        if cluster == HOME:
            if not isinstance(error, UnreachableError):
                raise error
            self.patience.bear(error)
        elif cluster not in self.lost:
            self.lost.add(cluster)
            console.err(_missing(cluster, error))

    def _answered(self, cluster: str) -> None:
        if cluster == HOME:
            self.patience.answered()
        elif cluster in self.lost:
            self.lost.remove(cluster)
            console.err(f"member cluster {cluster} can be reached again")

    def _read(self, source: LogSource, *, several: bool) -> None:
        query = {"follow": "true"}
        if source in self.heard_s:
            query["sinceSeconds"] = str(int(monotonic() - self.heard_s[source]) + _DOUBLED_S)
        elif source in self.queries:
            query = self.queries[source]
        elif source.cluster not in self.seen:  # what comes later is shown from its beginning
            query |= _query(self.args, several=several)
            if self.args.tail == 0:
                self.heard_s[source] = monotonic()  # nothing that was before is wanted
        self.queries.setdefault(source, query)
        self.readers[source] = asyncio.create_task(self._reader(source, query), name=f"log of {source.prefix}")

    async def _reader(self, source: LogSource, query: Mapping[str, str]) -> None:
        is_last = self.has_ended
        try:
            async for line in self.places.of(source).log(source.pod, source.container, query):
                console.out(f"[{source.prefix}] {line}")
                self.heard_s[source] = monotonic()
                self.refused.discard(source)
        except ObjectNotFoundError:
            pass  # the pod went away meanwhile
        except UserError as error:
            if is_last or (_is_answer(error) and source not in self.refused):
                self.refused.add(source)
                console.err(f"[{source.prefix}] {error}")
            if not is_last:
                del self.readers[source]  # read again

    async def _has_ended(self) -> bool:
        try:
            return state(await self.places.home.get(RLJOB, self.args.job)) in (*ENDED, SUSPENDED)
        except ObjectNotFoundError:
            return True
