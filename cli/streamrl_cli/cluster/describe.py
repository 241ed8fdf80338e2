"""One job in detail: conditions, pools, pods, how sizes changed, the last events. Pure."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from streamrl import names
from streamrl_cli.cluster.jobs import Object, bubbles, state, steps, why
from streamrl_cli.cluster.table import age, columns, text

MOST_EVENTS = 10
MOST_CHANGES = 5


def describe(
    job: Object, *, pools: Sequence[Object], pods: Sequence[Object], events: Sequence[Object], now: datetime
) -> Iterator[str]:
    """Lines about one job."""
    yield from _head(job, now=now)
    yield from _block("CONDITIONS", _conditions(job, now=now))
    yield from _block("POOLS", _pools(pools))
    yield from _block("PODS", _pods(pods, now=now))
    yield from _block("SCALING", _changes(pools, now=now))
    yield from _block("EVENTS", _events(events, now=now))


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


def _block(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield title
        yield from (f"  {line}" for line in lines)


def _conditions(job: Object, *, now: datetime) -> list[str]:
    found = job.get("status", {}).get("conditions", [])
    rows = [
        (one["type"], one["status"], one["reason"], age(one.get("lastTransitionTime"), now=now), one["message"])
        for one in found
    ]
    return columns(("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), rows) if rows else []


def _pools(pools: Sequence[Object]) -> list[str]:
    rows = []
    for pool in pools:
        spec, status = pool["spec"], pool.get("status", {})
        numbers = (spec.get("replicas"), status.get("desiredReplicas"), status.get("readyReplicas"))
        rows.append((spec["poolName"], spec["scaling"], *map(text, numbers), text(status.get("reason"))))
    return columns(("NAME", "SCALING", "ASKED", "DESIRED", "READY", "REASON"), rows) if rows else []


def _pods(pods: Sequence[Object], *, now: datetime) -> list[str]:
    rows = [
        (
            pod["metadata"]["name"],
            pod["metadata"].get("labels", {}).get(names.LABEL_ROLE, text(None)),
            _pod_state(pod),
            str(sum(container.get("restartCount", 0) for container in _containers(pod))),
            text(pod["spec"].get("nodeName")),
            age(pod["metadata"].get("creationTimestamp"), now=now),
        )
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))
    ]
    return columns(("NAME", "ROLE", "STATE", "RESTARTS", "NODE", "AGE"), rows) if rows else []


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]


def _pod_state(pod: Object) -> str:
    """As `kubectl get pods` has it: what a container waits for, else whether the pod is ready, else its phase."""
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason", "PodInitializing") not in ("PodInitializing", "ContainerCreating"):
            return str(waiting["reason"])
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready" and condition["status"] == "True":
            return "Ready"
    return str(pod.get("status", {}).get("reason") or pod.get("status", {}).get("phase") or text(None))


def _changes(pools: Sequence[Object], *, now: datetime) -> list[str]:
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
    rows = [(age(time, now=now), pool, change, reason) for time, pool, change, reason in newest]
    return columns(("AGO", "POOL", "CHANGE", "REASON"), rows) if rows else []


def _events(events: Sequence[Object], *, now: datetime) -> list[str]:
    newest = sorted(events, key=event_time)[-MOST_EVENTS:]
    rows = [
        (age(event_time(one), now=now), one.get("type", ""), one.get("reason", ""), event_text(one)) for one in newest
    ]
    return columns(("AGO", "TYPE", "REASON", "MESSAGE"), rows) if rows else []


def event_time(event: Object) -> str:
    """When it was last seen; events say so in four ways."""
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("deprecatedLastTimestamp")
        or event.get("eventTime")
        or event["metadata"].get("creationTimestamp")
        or ""
    )


def event_text(event: Object) -> str:
    """Its message on one line."""
    return " ".join(str(event.get("note") or event.get("message") or "").split())
