"""Pods that a StatefulSet should have made by now and has not: where somebody can see why.

The StatefulSet's own events have the reason, which we do not read; its status says nothing of it.
"""

from collections.abc import Sequence

from streamrl_operator.planning.moments import seconds_since
from streamrl_operator.planning.pods import asked
from streamrl_operator.planning.values import Observed

PATIENCE_S = 30.0
"""A StatefulSet makes its pods within a second or two; then something will not have them."""
_CAUSES = "usual are a quota, a LimitRange, a priority or runtime class that is not there"


def advice(stateful_set: str, *, observed: Observed, pods: int, since: Sequence[str | None]) -> str:
    """What to do about missing pods, to follow a text; empty while they may still come, or are not asked for yet.

    Args:
        stateful_set: its name.
        observed: it as it is, and the time.
        pods: that it should have.
        since: times of what the pods may have waited for, of which the last counts; None: for that they wait still.
    """
    waited_s = [seconds_since(each, now=observed.now) for each in since]
    if asked(observed.sets.get(stateful_set)) < pods or any(each is None or each < PATIENCE_S for each in waited_s):
        return ""
    return f"; kubectl describe statefulset {stateful_set} says why ({_CAUSES})"
