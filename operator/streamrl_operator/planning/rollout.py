"""Which pods of a pool are to be replaced now, after a change of their template, where the pool has `pod.maxUnavailable`.

A StatefulSet replaces its pods one after another: its own maxUnavailable stands behind a feature gate, and API servers without it drop the field.
A pool of 32 that drains for 90 s and loads weights for minutes would take hours. Its pods hold nothing that is lost, so its StatefulSet has the
strategy OnDelete, and the operator deletes as many as may be away. Level-triggered: what counts is which pods are of the newest revision.
"""

from collections.abc import Iterator

from streamrl import names
from streamrl_operator.planning import pods
from streamrl_operator.planning.values import Object, Observed

_ON_DELETE = "OnDelete"


def outdated_pods(observed: Observed) -> tuple[str, ...]:
    """Names of the pods that are to go now, of all pools."""
    assert observed.job is not None, "asked only of a valid job"
    return tuple(
        name
        for pool in observed.job.spec.generators
        if pool.pod.max_unavailable is not None
        for name in _of_pool(observed, pool=pool.name, most_away=pool.pod.max_unavailable)
    )


def _of_pool(observed: Observed, *, pool: str, most_away: int) -> Iterator[str]:
    found = observed.sets.get(names.pool(observed.name, pool))
    revision = _newest_revision(found)
    if found is None or not revision:
        return
    mine = [pod for pod in observed.pods if pods.is_generator(pod, pool=pool)]
    ready = sum(pods.is_ready(pod) for pod in mine)
    left = most_away - max(pods.asked(found) - ready, 0)
    outdated = [pod for pod in mine if pods.label(pod, pods.LABEL_REVISION) != revision and not pods.is_leaving(pod)]
    for pod in sorted(outdated, key=pods.place, reverse=True):
        if not pods.is_ready(pod):  # it is away anyway
            yield pods.name(pod)
        elif left > 0:
            left -= 1
            yield pods.name(pod)


def _newest_revision(found: Object | None) -> str:
    """Empty where the StatefulSet replaces its pods itself, or its controller has not seen the newest template yet."""
    if found is None or ((found.get("spec") or {}).get("updateStrategy") or {}).get("type") != _ON_DELETE:
        return ""
    status = found.get("status") or {}
    is_seen = int(status.get("observedGeneration") or 0) >= int(found["metadata"].get("generation") or 0)
    return str(status.get("updateRevision") or "") if is_seen else ""
