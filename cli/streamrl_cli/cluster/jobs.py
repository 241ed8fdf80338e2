"""What a stored job says: its state as one word, a row of the table, the whole description, and the loop that follows it to its end.

Loop of `follow`: gets the job every few seconds, and prints its progress when it changes and its events as they come. Ends
with the job, at Ctrl-C, or when the API server is silent for too long.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from time import monotonic

from streamrl import names
from streamrl.errors import EXIT_DONE, EXIT_FAULT
from streamrl_cli import console
from streamrl_cli.cluster.api import ApiClient, Object, ObjectNotFoundError, RetryDeadline, UnreachableError
from streamrl_cli.cluster.output import age, percent, section, text
from streamrl_operator.kube.kinds import RLJOB, Kind
from streamrl_operator.planning.conditions import FAILED, RECONCILING, STALLED, SUCCEEDED, SUSPENDED
from streamrl_operator.planning.conditions import state as state_of
from streamrl_operator.planning.members import clusters_by_pool
from streamrl_operator.planning.pods import containers, is_leaving, is_ready
from streamrl_operator.planning.values import trainer_cluster

SUSPENDING, DELETING, NOT_SEEN = "Suspending", "Deleting", "NotSeen"
ENDED = (SUCCEEDED, FAILED)
HEAD = ("NAME", "STATE", "STEP", "REWARD", "QUEUE", "BUBBLES", "GENERATORS", "AGE")
EVENT = Kind(api_version="v1", kind="Event", plural="events")
"""Of the old group: the roles `view` and `edit` of a cluster read no other."""
MOST_EVENTS = 10
MOST_CHANGES = 5
INTERVAL_S = 2.0
_OPERATOR_LATE_S = 20.0
"""An operator that has not looked at a new job after so long is probably not there."""
Say = Callable[[str], None]
Row = tuple[str, ...]


def conditions(job: Object) -> dict[str, Object]:
    """The conditions by type."""
    return {condition["type"]: condition for condition in job.get("status", {}).get("conditions", [])}


def state(job: Object) -> str:
    """One word: how the job is."""
    found = {kind: (_holds(conditions(job), kind), str(one["reason"])) for kind, one in conditions(job).items()}
    if job["metadata"].get("deletionTimestamp"):
        return DELETING
    reported = state_of(found)
    if reported not in ENDED and job["spec"].get("suspend"):
        return SUSPENDING if found.get(SUSPENDED, (False, ""))[1] == SUSPENDING else SUSPENDED
    return reported or NOT_SEEN


def why(job: Object) -> str:
    """The message of the condition that gave the state."""
    found = conditions(job)
    order = {SUCCEEDED: ("Succeeded",), FAILED: ("Failed",), SUSPENDED: ("Suspended", "Ready")}
    for kind in order.get(state(job), ("Ready",)):
        if kind in found:
            return str(found[kind]["message"])
    if state(job) == NOT_SEEN:
        return "no operator has looked at it yet"
    return ""


def row(job: Object, *, now: datetime) -> Row:
    """The job's line in the table."""
    status = job.get("status", {})
    return (
        job["metadata"]["name"],
        state(job),
        steps(job),
        text(status.get("reward")),
        text(status.get("queue")),
        bubbles(status),
        ready(status.get("pools", [])),
        age(job["metadata"].get("creationTimestamp"), now=now),
    )


def steps(job: Object) -> str:
    """Steps done, of those asked for."""
    return f"{text(job.get('status', {}).get('step'))}/{job['spec']['pipeline']['steps']}"


def bubbles(status: Object) -> str:
    """Where time is lost: pipeline and skew."""
    shares = status.get("bubbles")
    if not shares:
        return text(None)
    return f"{percent(shares['pipelinePercent'])} pipeline, {percent(shares['skewPercent'])} skew"


def ready(pools: Sequence[Object]) -> str:
    """Generator pods that are ready, of those that should be there."""
    if not pools:
        return text(None)
    return f"{sum(pool['ready'] for pool in pools)}/{sum(pool['desired'] for pool in pools)}"


def progress(job: Object) -> str:
    """One line of `--follow`: how far the job is."""
    status = job.get("status", {})
    return (
        f"{state(job)}: step {steps(job)}, reward {text(status.get('reward'))}, queue {text(status.get('queue'))}, "
        f"generators {ready(status.get('pools', []))}, bubbles {bubbles(status)}"
    )


def _holds(found: Mapping[str, Object], kind: str) -> bool:
    return kind in found and found[kind]["status"] == "True"


def describe(
    job: Object, *, pools: Sequence[Object], pods: Sequence[Object], events: Sequence[Object], now: datetime
) -> Iterator[str]:
    """Lines about one job."""
    yield from _head(job, now=now)
    yield from section("CONDITIONS", ("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), condition_rows(job, now=now))
    yield from section(
        "POOLS", *placed(("NAME", "SCALING", "ASKED", "DESIRED", "READY", "REASON"), pool_rows(pools), job)
    )
    yield from section("CLUSTERS", ("NAME", "NAMESPACE", "HAS", "PODS"), _clusters(job, pods=pods))
    yield from section("PODS", ("NAME", "ROLE", "STATE", "RESTARTS", "NODE", "AGE"), _pods(pods, now=now))
    yield from section("SCALING", ("AGO", "POOL", "CHANGE", "REASON"), change_rows(pools, now=now))
    yield from section("EVENTS", ("AGO", "TYPE", "REASON", "MESSAGE"), event_rows(events, now=now))


def lost_members(job: Object) -> str:
    """Which members cannot be reached, and why; empty: all that there are can be."""
    found = conditions(job)
    return str(found["ClusterUnreachable"]["message"]) if _holds(found, "ClusterUnreachable") else ""


def pool_places(job: Object) -> dict[str, str]:
    """Pool -> its cluster for people, and whether that cannot be reached; empty where all pools are at home."""
    far, lost = clusters_by_pool(job), lost_members(job).split("; ")
    if not far:
        return {}
    shown = {
        pool: f"{name} (not reached)" if any(one.startswith(f"cluster {name}: ") for one in lost) else name
        for pool, name in far.items()
    }
    return {pool["name"]: shown.get(pool["name"], "home") for pool in job["spec"]["generators"]}


def placed(head: Row, rows: Sequence[Row], job: Object, *, title: str = "CLUSTER") -> tuple[Row, list[Row]]:
    """A table of pools, with their clusters behind their names where some are in members."""
    places = pool_places(job)
    if not places:
        return head, list(rows)
    return (head[0], title, *head[1:]), [(row[0], places.get(row[0], text(None)), *row[1:]) for row in rows]


def _clusters(job: Object, *, pods: Sequence[Object]) -> list[Row]:
    """(name, namespace, what of the job, what is known of the pods) of each member that the job is in, or that it names."""
    at = trainer_cluster(job)
    far = [*([("trainer", at)] if at else []), *clusters_by_pool(job).items()]  # a pool may be called so too
    entries = {one["name"]: one["namespace"] for one in job.get("status", {}).get("clusters", ())}
    seen = {pod["metadata"].get("labels", {}).get(names.LABEL_CLUSTER) for pod in pods}
    return [
        (
            name,
            text(entries.get(name)),
            text(", ".join(part for part, cluster in far if cluster == name)),
            "below" if name in seen else f"--member-context {name}=CONTEXT shows those that are there",
        )
        for name in dict.fromkeys((*entries, *(cluster for _, cluster in far)))
    ]


def _head(job: Object, *, now: datetime) -> Iterator[str]:
    status, meta = job.get("status", {}), job["metadata"]
    yield f"{meta['namespace']}/{meta['name']}: {state(job)}{f' - {why(job)}' if why(job) else ''}"
    ended = f", ended {age(status['completionTime'], now=now)} ago" if status.get("completionTime") else ""
    yield f"  step {steps(job)}, made {age(meta.get('creationTimestamp'), now=now)} ago{ended}"
    yield f"  reward {text(status.get('reward'))}, queue {text(status.get('queue'))}, {text(status.get('tokensPerSecond'))} tokens/s"
    yield f"  bubbles {bubbles(status)}"
    counted, ignored = status.get("restarts", 0), status.get("ignoredRestarts", 0)
    most = job["spec"].get("failurePolicy", {}).get("maxRestarts")
    yield f"  attempt {text(status.get('attempt'))}, restarts {counted} of {text(most)}, not counted {ignored}"
    if status.get("checkpointPath"):
        yield f"  checkpoint {status['checkpointPath']}"
    if lost_members(job):
        yield f"  not reached: {lost_members(job)}"


def condition_rows(job: Object, *, now: datetime) -> list[Row]:
    """(type, status, reason, age, message) of each, without those that repeat others for GitOps tools."""
    return [
        (one["type"], one["status"], one["reason"], age(one.get("lastTransitionTime"), now=now), one["message"])
        for one in job.get("status", {}).get("conditions", [])
        if one["type"] not in (RECONCILING, STALLED)
    ]


def pool_rows(pools: Sequence[Object]) -> list[Row]:
    """(name, scaling, asked, desired, ready, reason) of each."""
    rows = []
    for pool in pools:
        spec, status = pool["spec"], pool.get("status", {})
        numbers = (spec.get("replicas"), status.get("desiredReplicas"), status.get("readyReplicas"))
        rows.append((spec["poolName"], spec["scaling"], *map(text, numbers), text(status.get("reason"))))
    return rows


def _pods(pods: Sequence[Object], *, now: datetime) -> list[Row]:
    return [
        (
            pod["metadata"]["name"],
            pod["metadata"].get("labels", {}).get(names.LABEL_ROLE, text(None)),
            _pod_state(pod),
            str(sum(container.get("restartCount", 0) for container in containers(pod))),
            text(pod["spec"].get("nodeName")),
            age(pod["metadata"].get("creationTimestamp"), now=now),
        )
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    ]


def _pod_state(pod: Object) -> str:
    """As `kubectl get pods` has it: what a container waits for, else whether the pod is ready, else its phase."""
    if is_leaving(pod):
        return "Terminating"
    for container in containers(pod):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason", "PodInitializing") not in ("PodInitializing", "ContainerCreating"):
            return str(waiting["reason"])
    if is_ready(pod):
        return "Ready"
    status = pod.get("status", {})
    return str(status.get("reason") or status.get("phase") or text(None))


def change_rows(pools: Sequence[Object], *, now: datetime) -> list[Row]:
    """(age, pool, change, reason) of the newest."""
    changes = [
        (
            change["time"],
            pool["spec"]["poolName"],
            f"{change['fromReplicas']} -> {change['toReplicas']}",
            change["reason"],
        )
        for pool in pools
        for change in pool.get("status", {}).get("scalingHistory", [])
    ]
    newest = sorted(changes)[-MOST_CHANGES:]
    return [(age(time, now=now), pool, change, reason) for time, pool, change, reason in newest]


def event_rows(events: Sequence[Object], *, now: datetime) -> list[Row]:
    """(age, type, reason, message) of the newest."""
    newest = sorted(events, key=event_time)[-MOST_EVENTS:]
    return [
        (age(event_time(one), now=now), one.get("type", ""), one.get("reason", ""), event_text(one)) for one in newest
    ]


def event_time(event: Object) -> str:
    """When it was last seen; events say so in four ways."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("lastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def event_text(event: Object) -> str:
    """Its message on one line."""
    return " ".join(str(event.get("message") or "").split())


async def events_of(job: Object, *, cluster: ApiClient) -> list[Object]:
    """What was told of this very job."""
    return await cluster.find(EVENT, fields=about(job))


def about(job: Object) -> str:
    """The field selector of a job's events."""
    return f"involvedObject.name={job['metadata']['name']},involvedObject.uid={job['metadata']['uid']}"


async def follow(name: str, *, cluster: ApiClient, interval_s: float = INTERVAL_S, say: Say = console.out) -> int:
    """Show a job's progress until it has ended; 0 Succeeded, 1 Failed or deleted, 130 after Ctrl-C."""
    try:
        return await _JobFollower(name, cluster=cluster, say=say).to_the_end(interval_s)
    except asyncio.CancelledError:
        say(f"detached; the job goes on. Look again: streamrl status {name} -n {cluster.namespace}")
        return console.EXIT_INTERRUPTED


class _JobFollower:
    """What was shown already."""

    def __init__(self, name: str, *, cluster: ApiClient, say: Say) -> None:
        self.name = name
        self.cluster = cluster
        self.say = say
        self.last_line = ""
        self.seen_events: set[tuple[str, str]] = set()
        self.began = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.begun_s = monotonic()
        self.patience = RetryDeadline()
        self.warned = False

    async def to_the_end(self, interval_s: float) -> int:
        while True:
            try:
                code = await self._look()
            except ObjectNotFoundError:
                self.say(f"{self.name} was deleted")
                return EXIT_FAULT
            except UnreachableError as error:
                self.patience.bear(error)
                self._show(f"waiting: {error}")
                code = None
            if code is not None:
                return code
            await asyncio.sleep(interval_s)

    async def _look(self) -> int | None:
        """Show what is new; the exit code if the job has ended."""
        job = await self.cluster.get(RLJOB, self.name)
        await self._show_events(job)
        self.patience.answered()
        now = state(job)
        self._warn(now)
        self._show(_line(job))
        if now not in ENDED:
            return None
        return EXIT_DONE if now == SUCCEEDED else EXIT_FAULT

    async def _show_events(self, job: Object) -> None:
        for event in sorted(await events_of(job, cluster=self.cluster), key=event_time):
            seen = (event["metadata"]["name"], event_time(event))
            if seen not in self.seen_events and event_time(event) >= self.began:
                self.say(f"  {event.get('type', '')} {event.get('reason', '')}: {event_text(event)}")
            self.seen_events.add(seen)

    def _show(self, line: str) -> None:
        if line != self.last_line:
            self.say(line)
        self.last_line = line

    def _warn(self, now: str) -> None:
        if now == NOT_SEEN and not self.warned and monotonic() - self.begun_s > _OPERATOR_LATE_S:
            self.warned = True
            self.say("no operator has looked at the job yet; is it installed, and does it watch this namespace?")


def _line(job: Object) -> str:
    message = f"; {why(job)}" if state(job) in (FAILED, DELETING) or not job.get("status", {}).get("step") else ""
    return f"{progress(job)}{message}"
