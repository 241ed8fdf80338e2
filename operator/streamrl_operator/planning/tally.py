"""Counts failures, each once, and says when there were too many.

What is counted already is in the status (`seenFailures`): the failures that can be seen now, and the last few that
cannot be seen any more, in case a look goes back in time. A pod that goes because we want it so is no failure: above the
wanted number, or of an older template in a rolling update.

A rule that replaces a pod has no limit but time: another pod forgets the kubelet's back-off, and one that fails at once wherever it runs
would be made again for ever without a pause. So a pod is replaced only if it has lived for a time that doubles with each restart that
was not counted; before that its container is started again in place, and waits as the kubelet lets it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from streamrl.spec.training import FailurePolicy
from streamrl.status import RLJobStatus
from streamrl_operator.planning import failures, pods
from streamrl_operator.planning.failures import FAIL, NO_RULE, REPLACE, RESTART, Judged
from streamrl_operator.planning.moments import seconds_since
from streamrl_operator.planning.values import Event, Object

MOST_SEEN = 256
"""As the status has it."""
KEPT_UNSEEN = 32
"""Failures that are remembered although they cannot be seen any more."""
MOST_EVENTS = 8
"""In one look; the rest is one more event."""
FIRST_LIFE_S, LONGEST_LIFE_S = 10.0, 300.0
"""Of a pod before a rule replaces it: as a kubelet's back-off."""
_REVISION = "controller-revision-hash"
"""Label of a StatefulSet's pods: the template that they were made from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """After a look at all pods."""

    restarts: int
    ignored: int
    seen: tuple[str, ...]
    new: tuple[Judged, ...] = ()
    """Counted now."""
    delete_pods: tuple[str, ...] = ()


def count(
    before: RLJobStatus,
    *,
    policy: FailurePolicy,
    all_pods: Sequence[Object],
    sets: Mapping[str, Object],
    desired: Mapping[str, int],
    now: datetime,
) -> Tally:
    """Count what is new. `desired`: StatefulSet -> pods that it should have."""
    known = set(before.seen_failures)
    ours = {pods.uid(pod): pod for pod in all_pods if _is_ours(pod, sets=sets, desired=desired)}
    found = [failure for pod in _ordered(all_pods) if pods.uid(pod) not in ours for failure in failures.of_pod(pod)]
    counted = [failure.id for failure in found if failure.id in known]
    fresh = [failure for failure in found if failure.id not in known][: MOST_SEEN - len(counted)]
    new = tuple(failures.judge(failure, policy) for failure in fresh)
    young = {pods.name(pod) for pod in all_pods if _is_young(pod, ignored=before.ignored_restarts or 0, now=now)}
    gone = {judged.failure.pod for judged in new if _is_replaced(judged)} - young
    marked = [failures.pod_id(pod) for pod in all_pods if pods.uid(pod) in ours or pods.name(pod) in gone]
    return Tally(
        restarts=(before.restarts or 0) + sum(judged.action == RESTART for judged in new),
        ignored=(before.ignored_restarts or 0) + sum(judged.action == REPLACE for judged in new),
        seen=_remembered(before.seen_failures, [*counted, *(failure.id for failure in fresh), *marked]),
        new=new,
        delete_pods=tuple(sorted(gone)),
    )


def _is_replaced(judged: Judged) -> bool:
    """Whether a rule wants another pod instead of a container that is started again in place."""
    return judged.action == REPLACE and judged.rule != NO_RULE and bool(judged.failure.container)


def least_life_s(ignored: int) -> float:
    """Of a pod that a rule may replace, after so many restarts that were not counted; the first is replaced at once."""
    return 0.0 if ignored == 0 else min(FIRST_LIFE_S * 2.0 ** min(ignored - 1, 16), LONGEST_LIFE_S)


def _is_young(pod: Object, *, ignored: int, now: datetime) -> bool:
    age_s = seconds_since(pod["metadata"].get("creationTimestamp"), now=now)
    return age_s is not None and age_s < least_life_s(ignored)


def mark(before: RLJobStatus, *, all_pods: Sequence[Object]) -> tuple[str, ...]:
    """`seenFailures` while no pod is wanted: what goes wrong now is the end that we asked for, and is never counted."""
    leaving = [failures.pod_id(pod) for pod in all_pods if pods.is_leaving(pod)]
    ended = [failure.id for pod in _ordered(all_pods) for failure in failures.of_containers(pod)]
    return _remembered(before.seen_failures, [*ended, *leaving])


def events(tally: Tally, *, most_restarts: int) -> list[Event]:
    """One for each failure that was counted now."""
    told = [_event(judged, tally=tally, most_restarts=most_restarts) for judged in tally.new[:MOST_EVENTS]]
    if rest := len(tally.new) - len(told):
        told.append(Event(kind="Warning", reason="PodFailed", message=f"and {rest} more failures of pods"))
    return told


def _event(judged: Judged, *, tally: Tally, most_restarts: int) -> Event:
    counts = f"restarts that count: {tally.restarts} of {most_restarts}"
    is_left = _is_replaced(judged) and judged.failure.pod not in tally.delete_pods
    left = "; its pod is new and stays: the container is started again in place" if is_left else ""
    message = f"{judged.failure.text}; rule {judged.rule}: {judged.action}; {counts}{left}"
    return Event(kind="Normal" if judged.action == REPLACE else "Warning", reason="PodFailed", message=message)


def first_fatal(tally: Tally) -> Judged | None:
    """The first failure after which the job is not tried again."""
    return next((judged for judged in tally.new if judged.action == FAIL), None)


def _ordered(all_pods: Sequence[Object]) -> list[Object]:
    """The trainer's first: where there are more failures than can be remembered, its count."""
    return sorted(all_pods, key=lambda pod: (not pods.is_trainer(pod), not pods.trains(pod), pods.place(pod)))


def _is_ours(pod: Object, *, sets: Mapping[str, Object], desired: Mapping[str, int]) -> bool:
    if not pods.is_leaving(pod):
        return False
    owner, ordinal = pods.place(pod)
    if ordinal >= desired.get(owner, 0):
        return True
    found = sets.get(owner) or {}
    if _is_changing(found):
        return True
    newest = (found.get("status") or {}).get("updateRevision")
    made_from = pods.label(pod, _REVISION)
    return bool(newest and made_from and newest != made_from)


def _is_changing(found: Object) -> bool:
    """Whether our last change of the StatefulSet is not in its status yet: its controller deletes pods first and tells of the template after."""
    generation, seen = (
        (found.get("metadata") or {}).get("generation"),
        (found.get("status") or {}).get("observedGeneration"),
    )
    return isinstance(generation, int) and isinstance(seen, int) and seen < generation


def _remembered(before: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """At most `MOST_SEEN`: first what can be seen and is known, then what is new, then what cannot be seen any more.

    The order stays, so that nothing is written while nothing is new.
    """
    now, known = dict.fromkeys(visible), set(before)
    unseen = [one for one in before if one not in now]
    kept = len(before) - len(unseen)
    new = [one for one in now if one not in known][: MOST_SEEN - kept]
    room = min(KEPT_UNSEEN, MOST_SEEN - kept - len(new))
    dropped = set(unseen[: max(len(unseen) - room, 0)])
    return (*(one for one in before if one not in dropped), *new)
