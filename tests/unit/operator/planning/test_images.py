"""An upgrade of the operator: a job that has begun keeps its images and its job.json, whatever is lost; one that waits takes the new ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from streamrl import keys
from streamrl.status import Images
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import JobDecision, Observed, PlanningSettings
from support.observed_jobs import JOB, all_ready, carried_out, job_document, observed, page, trainer, validated

OLD = PlanningSettings(namespace="s", trainer_image="trainer:1", generator_image="generator:1")
NEW = PlanningSettings(namespace="s", trainer_image="trainer:2", generator_image="generator:2")
OWN = {"pod": {"image": "mine:7"}}
TRAINER, POOL, CONFIG = (f"{JOB}-{name}" for name in ("trainer", "sim", "job"))


def objects(look: Observed, decision: JobDecision, settings: PlanningSettings) -> dict[str, dict[str, Any]]:
    """The StatefulSets and the ConfigMap that follow, by name."""
    assert look.job is not None
    plan = JobPlan(
        job=look.job,
        namespace="default",
        uid="u-job",
        wanted=decision.wanted,
        settings=settings,
        resolved=look.resolved,
    )
    return {
        each["metadata"]["name"]: each for each in plan_objects(plan) if each["kind"] in ("StatefulSet", "ConfigMap")
    }


def reconciled(look: Observed, settings: PlanningSettings) -> tuple[Observed, dict[str, dict[str, Any]]]:
    """A look by an operator of these settings: the job after it, and its objects."""
    decision = decide(look, settings=settings)
    made = objects(look, decision, settings)
    sets = {name: each for name, each in made.items() if each["kind"] == "StatefulSet"}
    after = carried_out(look, decision, seconds=60)
    return replace(after, sets=sets, resolved=made[CONFIG]["data"], pods=all_ready()), made


def job(**changes: Any) -> Observed:
    """At the first visit with a trainer that is ready, for which the generators have waited."""
    return observed(job_document(**changes), pods=[trainer()])


def suspended(look: Observed, value: bool) -> Observed:
    document = {**look.raw, "spec": {**look.raw["spec"], "suspend": value}}
    return replace(look, raw=document, job=validated(document))


def images(made: dict[str, dict[str, Any]]) -> tuple[str, str]:
    """Of the trainer and of the pool."""
    trainer, pool = (made[name]["spec"]["template"]["spec"]["containers"][0]["image"] for name in (TRAINER, POOL))
    return trainer, pool


def told(release: int) -> dict[str, str]:
    """The status of a job that was begun with it."""
    trainer = f"trainer:{release}"
    return {"trainer": trainer, "generator": f"generator:{release}", "tasks": trainer}


def test_nothing_of_a_job_that_has_begun_changes() -> None:
    begun, before = reconciled(job(), OLD)
    after, made = reconciled(replace(begun, numbers=page()), NEW)
    assert made == before
    assert after.raw["status"]["images"] == told(1)


def test_an_image_of_its_own_does_not_mix_two_releases() -> None:
    document = job_document()
    document["spec"]["trainer"] |= OWN
    begun, _ = reconciled(observed(document), OLD)
    assert images(reconciled(begun, NEW)[1]) == ("mine:7", "generator:1")
    taken_back = {**document, "spec": {**document["spec"], "trainer": {**document["spec"]["trainer"], "pod": {}}}}
    assert images(reconciled(replace(begun, job=validated(taken_back)), NEW)[1]) == ("trainer:1", "generator:1")


def test_a_job_that_waits_takes_the_images_of_the_day_when_it_begins() -> None:
    waiting, _ = reconciled(job(suspend=True), OLD)
    assert "images" not in waiting.raw["status"]
    begun, made = reconciled(suspended(waiting, value=False), NEW)
    assert images(made) == ("trainer:2", "generator:2")
    assert begun.raw["status"]["images"] == told(2)


def test_one_that_is_suspended_later_keeps_them() -> None:
    begun, before = reconciled(job(), OLD)
    waiting, still = reconciled(suspended(begun, value=True), NEW)
    assert images(still) == images(before)
    assert reconciled(suspended(waiting, value=False), NEW)[1] == before


def test_it_moves_to_another_release_without_pods_and_without_its_config_map() -> None:
    waiting, _ = reconciled(suspended(reconciled(job(), OLD)[0], value=True), OLD)
    freed, _ = reconciled(replace(waiting, resolved={}), NEW)
    assert images(reconciled(suspended(freed, value=False), NEW)[1]) == ("trainer:2", "generator:2")


LOST: dict[str, Callable[[Observed], Observed]] = {
    "status": lambda look: replace(look, raw={key: value for key, value in look.raw.items() if key != "status"}),
    "config map": lambda look: replace(look, resolved={}),
    "config map and a pool's set": lambda look: replace(look, resolved={}, sets={TRAINER: look.sets[TRAINER]}),
    "config map and status": lambda look: LOST["config map"](LOST["status"](look)),
    "a pool's set": lambda look: replace(look, sets={TRAINER: look.sets[TRAINER]}),
    "file": lambda look: replace(look, resolved={keys.FILE_JOB: look.resolved[keys.FILE_JOB]}),
    "sense": lambda look: replace(look, resolved={**look.resolved, keys.FILE_IMAGES: '{"trainer":""}'}),
}


@pytest.mark.parametrize("lost", ["nothing", "config map and status"])
def test_a_job_whose_release_had_no_container_for_tasks_gets_none(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = OLD.images.model_copy(update={"tasks": None})
    with monkeypatch.context() as earlier:
        earlier.setattr(PlanningSettings, "images", without)
        begun, before = reconciled(job(), OLD)
    assert "tasks" not in begun.resolved[keys.FILE_IMAGES]
    _, made = reconciled((LOST | {"nothing": lambda look: look})[lost](begun), NEW)
    assert made == before


@pytest.mark.parametrize("what", LOST)
def test_what_is_lost_is_found_again(what: str) -> None:
    begun, before = reconciled(job(), OLD)
    after, made = reconciled(LOST[what](begun), NEW)
    assert made == before
    assert Images.model_validate(after.raw["status"]["images"]) == OLD.images


def test_with_the_config_map_lost_an_image_of_its_own_is_not_taken_for_the_operators() -> None:
    document = job_document()
    first = document["spec"]["generators"][0]
    document["spec"]["generators"] = [first | OWN, first | {"name": "other"}]
    begun, _ = reconciled(observed(document), OLD)
    after, _ = reconciled(LOST["config map and status"](begun), NEW)
    assert after.raw["status"]["images"] == told(1)


# ---- job.json


def job_json(look: Observed, text: str) -> str:
    """What is written where `text` is there."""
    made = reconciled(replace(look, resolved={**look.resolved, keys.FILE_JOB: text}), NEW)[1]
    return str(made[CONFIG]["data"][keys.FILE_JOB])


def edited(text: str, **spec: Any) -> str:
    document = json.loads(text)
    return json.dumps({**document, "spec": {**document["spec"], **spec}})


def test_a_job_json_of_another_release_stays() -> None:
    begun, _ = reconciled(job(), OLD)
    text = begun.resolved[keys.FILE_JOB]
    document = json.loads(text)
    del document["spec"]["seed"]  # as by a release that did not know it; it has its default
    for theirs in (json.dumps(document), edited(text, suspend=True), edited(text, failurePolicy={"maxRestarts": 9})):
        assert job_json(begun, theirs) == theirs


def test_a_job_json_with_the_pods_of_an_earlier_release_stays() -> None:
    begun, _ = reconciled(job(), OLD)
    document = json.loads(begun.resolved[keys.FILE_JOB])
    assert "pod" not in document["spec"]["trainer"]  # images of any release read it, however pods are spelled
    document["spec"]["trainer"]["pod"] = {"resources": {"requests": {}, "limits": {"nvidia.com/gpu": "1"}}, "env": []}
    theirs = json.dumps(document)
    assert job_json(begun, theirs) == theirs
    document["spec"]["trainer"]["pod"] = {"env": [{"name": "T", "secretKey": {"name": "s", "key": "k"}}]}
    assert job_json(begun, json.dumps(document)) == begun.resolved[keys.FILE_JOB]


def test_what_may_change_leaves_job_json_alone() -> None:
    begun, before = reconciled(job(), OLD)
    document = {**begun.raw, "spec": {**begun.raw["spec"], "activeDeadlineSeconds": 3600}}
    document["spec"]["generators"] = [
        {**document["spec"]["generators"][0], "scaling": {"static": {"replicas": 5}}, **OWN},
    ]
    _, made = reconciled(replace(begun, raw=document, job=validated(document)), NEW)
    assert made[CONFIG] == before[CONFIG]
    assert made[POOL]["spec"]["replicas"] == 5
    assert images(made) == ("trainer:1", "mine:7")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: edited(text, seed=7),
        lambda text: edited(text, unknown=1),
        lambda text: text[:-20],
        lambda text: text.replace(f'"{JOB}"', '"another"'),
        lambda text: text.replace('"default"', '"elsewhere"'),
        lambda _: "[" * 100_000,
    ],
    ids=["seed", "unknown field", "half", "name", "namespace", "deep"],
)
def test_a_job_json_that_says_something_else_is_put_right(spoil: Callable[[str], str]) -> None:
    begun, _ = reconciled(job(), OLD)
    text = begun.resolved[keys.FILE_JOB]
    assert spoil(text) != text
    assert job_json(begun, spoil(text)) == text
