"""How a changed pool's pods are replaced: as many at once as may be away, and never more."""

from dataclasses import replace
from typing import Any

import pytest

from streamrl.spec import parse_job
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.replicas import outdated_pods
from streamrl_operator.planning.values import Observed
from support.observed_jobs import JOB, SETTINGS, all_ready, generator, job_document, observed
from support.planned import find, full_document, planned

SET = f"{JOB}-sim"


def look(pods: list[dict[str, Any]], *, most_away: int | None = 2, seen: int = 3, kind: str = "OnDelete") -> Observed:
    """A pool of six whose newest template is `r2`."""
    document = job_document()
    if most_away is not None:
        document["spec"]["generators"][0]["pod"] = {"maxUnavailable": most_away}
    there = {
        "metadata": {"name": SET, "generation": 3},
        "spec": {"replicas": 6, "updateStrategy": {"type": kind}},
        "status": {"observedGeneration": seen, "updateRevision": "r2"},
    }
    return observed(document, pods=pods, sets={SET: there})


def generators(*revisions: str, **given: Any) -> list[dict[str, Any]]:
    return [generator(ordinal, revision=revision, **given) for ordinal, revision in enumerate(revisions)]


def gone(pods: list[dict[str, Any]], **given: Any) -> list[str]:
    return [name.removeprefix(f"{SET}-") for name in outdated_pods(look(pods, **given))]


def test_as_many_go_as_may_be_away() -> None:
    assert gone(generators(*["r1"] * 6)) == ["5", "4"]
    assert gone(generators(*["r1"] * 6), most_away=9) == ["5", "4", "3", "2", "1", "0"]
    assert gone(generators("r1", "r1", "r1", "r1", "r2", "r2")) == ["3", "2"]


def test_what_is_away_counts() -> None:
    old, new = generators(*["r1"] * 6), generators(*["r2"] * 6, ready=False)
    assert gone([*old[:5], new[5]]) == ["4"]
    assert gone([*old[:4], *new[4:]]) == []
    assert gone(old[:4]) == []
    leaving = [generator(5, revision="r1", leaving=True), generator(4, revision="r1", leaving=True)]
    assert gone([*old[:4], *leaving]) == []


def test_what_does_not_work_goes_first() -> None:
    """A typo in an image is mended at once."""
    assert gone(generators(*["r1"] * 6, ready=False)) == ["5", "4", "3", "2", "1", "0"]


@pytest.mark.parametrize("given", [{"most_away": None}, {"kind": "RollingUpdate"}, {"seen": 2}])
def test_nothing_goes_where_the_set_does_it_or_does_not_know_yet(given: dict[str, Any]) -> None:
    assert gone(generators(*["r1"] * 6), **given) == []


def test_a_rollout_ends_and_is_never_beyond_its_bound() -> None:
    pods = generators(*["r1"] * 6)
    for _ in range(20):
        names = set(outdated_pods(look(pods)))
        pods = [pod for pod in pods if pod["metadata"]["name"] not in names]
        assert len(pods) >= 4
        made = {int(pod["metadata"]["name"].rpartition("-")[2]) for pod in pods}
        pods += [generator(ordinal, revision="r2") for ordinal in range(6) if ordinal not in made]
        if not names:
            break
    assert {pod["metadata"]["labels"]["controller-revision-hash"] for pod in pods} == {"r2"}


def test_the_decision_has_them() -> None:
    pods = [*all_ready(generators=0), *generators(*["r1"] * 6)]
    running = replace(look(pods), pods=pods)
    assert decide(running, settings=SETTINGS).delete_pods == (f"{SET}-5", f"{SET}-4")


def test_only_such_a_pool_leaves_its_pods_to_the_operator() -> None:
    document = full_document()
    document["spec"]["generators"][1]["pod"] = {"maxUnavailable": 3}
    objects = planned(parse_job(document))
    kinds = {
        name: find(objects, "StatefulSet", f"full-{name}")["spec"]["updateStrategy"]["type"]
        for name in ("trainer", "fixed", "auto")
    }
    assert kinds == {"trainer": "RollingUpdate", "fixed": "RollingUpdate", "auto": "OnDelete"}
