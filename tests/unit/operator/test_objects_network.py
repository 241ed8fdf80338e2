"""Services and NetworkPolicies: who reaches whom, as a matrix over the policies as planned."""

from collections.abc import Mapping
from typing import Any

import pytest

from streamrl import names
from support.planned import find, full_job, planned

TRAINER = {names.LABEL_JOB: "full", names.LABEL_ROLE: "trainer"}
GENERATOR = {names.LABEL_JOB: "full", names.LABEL_ROLE: "generator", names.LABEL_POOL: "auto"}
OTHER_JOB = {names.LABEL_JOB: "other", names.LABEL_ROLE: "generator"}
STRANGER: dict[str, str] = {"app": "web"}
OUTSIDE = None
"""Not a pod of the namespace."""


def matches(selector: Mapping[str, Any], labels: Mapping[str, str] | None) -> bool:
    return labels is not None and selector.get("matchLabels", {}).items() <= labels.items()


def allowed(rules: list[dict[str, Any]], *, peer: Mapping[str, str] | None, port: int, side: str) -> bool:
    return any(
        any(each["port"] == port for each in rule["ports"])
        and (side not in rule or any(matches(one["podSelector"], peer) for one in rule[side]))
        for rule in rules
    )


def admits(direction: str, *, pod: Mapping[str, str] | None, peer: Mapping[str, str] | None, port: int) -> bool:
    """What an enforcer decides: a pod that no policy selects in this direction is open."""
    kind, side = ("Ingress", "from") if direction == "in" else ("Egress", "to")
    policies = [each["spec"] for each in planned(full_job()) if each["kind"] == "NetworkPolicy"]
    selecting = [spec for spec in policies if kind in spec["policyTypes"] and matches(spec["podSelector"], pod)]
    return not selecting or any(allowed(spec[kind.lower()], peer=peer, port=port, side=side) for spec in selecting)


@pytest.mark.parametrize(
    ("source", "target", "port", "reaches"),
    [
        (GENERATOR, TRAINER, 50051, True),
        (GENERATOR, TRAINER, 50052, True),
        (GENERATOR, TRAINER, 8080, False),  # has no business there
        (GENERATOR, TRAINER, 22, False),
        (GENERATOR, GENERATOR, 8080, False),
        (GENERATOR, OUTSIDE, 443, False),
        (GENERATOR, STRANGER, 80, False),
        (GENERATOR, OUTSIDE, 53, True),
        (TRAINER, OUTSIDE, 443, True),  # hubs, rewards
        (TRAINER, GENERATOR, 8080, True),
        (TRAINER, GENERATOR, 50051, False),
        (OTHER_JOB, TRAINER, 50051, False),
        (OTHER_JOB, TRAINER, 50052, False),
        (STRANGER, TRAINER, 50051, False),
        (STRANGER, TRAINER, 8080, True),  # signals are numbers
        (OUTSIDE, TRAINER, 8080, True),
        (OUTSIDE, TRAINER, 8081, True),
        (OUTSIDE, TRAINER, 50051, False),
        (OUTSIDE, GENERATOR, 8080, True),
        (OUTSIDE, GENERATOR, 50051, False),
    ],
)
def test_who_reaches_whom(
    source: Mapping[str, str] | None, target: Mapping[str, str] | None, port: int, *, reaches: bool
) -> None:
    out, into = (admits("out", pod=source, peer=target, port=port), admits("in", pod=target, peer=source, port=port))
    assert (out and into) is reaches


def test_generators_reach_the_scheduler_before_it_is_ready() -> None:
    spec = find(planned(full_job()), "Service", "full-scheduler")["spec"]
    assert spec["publishNotReadyAddresses"] is True
    assert spec["selector"] == TRAINER
    assert {port["name"]: (port["port"], port["targetPort"]) for port in spec["ports"]} == {
        "grpc": (50051, 50051),
        "weights": (50052, 50052),
        "signals": (8080, 8080),
    }


@pytest.mark.parametrize(("name", "early"), [("full-trainer", True), ("full-auto", None)])
def test_pods_have_names(name: str, *, early: bool | None) -> None:
    objects = planned(full_job())
    spec = find(objects, "Service", name)["spec"]
    assert (spec["clusterIP"], spec.get("publishNotReadyAddresses")) == ("None", early)
    assert find(objects, "StatefulSet", name)["spec"]["serviceName"] == name


def test_drains() -> None:
    objects = planned(full_job())
    assert find(objects, "PodDisruptionBudget", "full-trainer")["spec"]["minAvailable"] == 1
    assert find(objects, "PodDisruptionBudget", "full-auto")["spec"]["maxUnavailable"] == "10%"
