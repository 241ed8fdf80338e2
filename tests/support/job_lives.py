"""A job looked at time after time: each verdict is carried out before the next look."""

from dataclasses import replace
from typing import Any

from streamrl_operator.planning.life import decide
from streamrl_operator.planning.values import JobDecision, Observed
from support.observed_jobs import SETTINGS, all_ready, carried_out, observed, page, validated


def reported(look: Observed) -> JobDecision:
    """The verdict, whose statuses an API server would take."""
    return decide(look, settings=SETTINGS)


def conditions(decision: JobDecision) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in decision.status["conditions"]}


def message(decision: JobDecision, kind: str) -> str:
    return next(one["message"] for one in decision.status["conditions"] if one["type"] == kind)


def reasons(decision: JobDecision) -> list[str]:
    return [event.reason for event in decision.events]


def lived(*looks: dict[str, Any], start: Observed | None = None) -> tuple[Observed, JobDecision]:
    """One look after the other, each with its changes, ten seconds apart."""
    now = start or observed()
    for changes in looks:
        now = replace(now, **changes)
        decision = reported(now)
        now = carried_out(now, decision, seconds=10)
    return now, decision


def edited(look: Observed, **spec: Any) -> Observed:
    """The same job with another spec, as after `kubectl edit`."""
    metadata = {**look.raw["metadata"], "generation": look.raw["metadata"]["generation"] + 1}
    document = {**look.raw, "spec": {**look.raw["spec"], **spec}, "metadata": metadata}
    return replace(look, raw=document, job=validated(document))


def running() -> Observed:
    return lived({"pods": all_ready()}, {"numbers": page()})[0]
