"""What an RLJob of the API server says of itself, in the words of the tables. Pure: plain data in, texts out."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from streamrl_cli.cluster.table import age, percent, text

Object = Mapping[str, Any]

SUCCEEDED, FAILED, SUSPENDED, SUSPENDING, RUNNING, DELETING, NOT_SEEN = (
    "Succeeded",
    "Failed",
    "Suspended",
    "Suspending",
    "Running",
    "Deleting",
    "NotSeen",
)
ENDED = (SUCCEEDED, FAILED)
HEAD = ("NAME", "STATE", "STEP", "REWARD", "QUEUE", "BUBBLES", "GENERATORS", "AGE")


def conditions(job: Object) -> dict[str, Object]:
    """The conditions by type."""
    return {condition["type"]: condition for condition in job.get("status", {}).get("conditions", [])}


def state(job: Object) -> str:
    """One word: how the job is."""
    found = conditions(job)
    if job["metadata"].get("deletionTimestamp"):
        return DELETING
    if _holds(found, "Succeeded"):
        return SUCCEEDED
    if _holds(found, "Failed"):
        return FAILED
    if job["spec"].get("suspend") or _holds(found, "Suspended"):
        return SUSPENDING if found.get("Suspended", {}).get("reason") == SUSPENDING else SUSPENDED
    if _holds(found, "Ready"):
        return RUNNING
    return str(found["Ready"]["reason"]) if "Ready" in found else NOT_SEEN


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


def row(job: Object, *, now: datetime) -> tuple[str, ...]:
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
