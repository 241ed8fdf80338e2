"""What a job adds to its pods beside what the operator makes: environment of Secrets, containers, an account, amounts for our helpers."""

from collections.abc import Callable
from typing import Any

import pytest

from streamrl import keys, names
from streamrl.spec import parse_job
from streamrl_operator.planning.failures import failures_of_containers
from support.planned import containers, find, full_document, planned, templates

SPREAD = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
EXTRA = {"name": "logs", "image": "fluent-bit:3", "securityContext": {"runAsUser": 101}}


def planned_with(**pod: Any) -> list[dict[str, Any]]:
    """What is planned for a job with `pod` in both kinds of pods."""
    document = full_document()
    document["spec"]["trainer"]["pod"] |= pod
    document["spec"]["generators"][0]["pod"] |= {key: value for key, value in pod.items() if key not in ONLY_TRAINERS}
    return planned(parse_job(document))


ONLY_TRAINERS = ("prepareResources", "schedulerResources", "schedulerStartSeconds")


def trainer(**pod: Any) -> dict[str, Any]:
    return dict(templates(planned_with(**pod)))["full-trainer"]["spec"]


def generator(**pod: Any) -> dict[str, Any]:
    return dict(templates(planned_with(**pod)))["full-fixed"]["spec"]


def named(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (one for one in containers({"spec": spec}) if one["name"] == name)
    return found


@pytest.mark.parametrize("pods", [trainer, generator])
def test_no_key_of_a_secret_becomes_a_variable_of_ours(pods: Callable[..., dict[str, Any]]) -> None:
    ours = {value for key, value in vars(keys).items() if key.startswith("ENV_") and value.startswith("STREAMRL_")}
    without, given = pods(), pods(envFrom=[{"secretRef": {"name": "s"}}])
    for container in containers({"spec": given}):
        assert container["envFrom"] == [{"secretRef": {"name": "s"}}]
        variables = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
        before = {
            one["name"]: one.get("value", one.get("valueFrom")) for one in named(without, container["name"])["env"]
        }
        assert set(variables) >= ours
        assert {name: value for name, value in variables.items() if name not in before} == dict.fromkeys(
            ours - set(before), ""
        )
        assert before.items() <= variables.items()


def test_containers_stand_around_ours_and_have_no_more_rights() -> None:
    before = EXTRA | {"name": "load", "securityContext": {"capabilities": {"drop": ["NET_RAW"]}}}
    spec = trainer(initContainers=[before], containers=[EXTRA])
    assert [one["name"] for one in spec["initContainers"]] == ["load", "prepare", "tasks", "scheduler"]
    assert [one["name"] for one in spec["containers"]] == ["trainer", "logs"]
    ours = {
        key: value for key, value in spec["containers"][0]["securityContext"].items() if key != "readOnlyRootFilesystem"
    }
    assert named(spec, "load")["securityContext"] == ours
    assert named(spec, "logs")["securityContext"] == ours | {"runAsUser": 101}
    assert all("env" not in named(spec, name) for name in ("load", "logs"))


def test_added_containers_do_not_see_a_generators_processes() -> None:
    assert generator()["shareProcessNamespace"] is True
    assert "shareProcessNamespace" not in generator(containers=[EXTRA])
    assert "shareProcessNamespace" not in generator(initContainers=[EXTRA])


def test_an_added_container_that_fails_is_no_failure_of_the_job() -> None:
    ended = {"restartCount": 1, "state": {}, "lastState": {"terminated": {"exitCode": 2, "reason": "Error"}}}
    pod = {"metadata": {"name": "j-trainer-0"}, "status": {"containerStatuses": [ended | {"name": "logs"}]}}
    assert list(failures_of_containers(pod)) == []
    pod["status"]["containerStatuses"] += [ended | {"name": names.CONTAINER_TRAINER}]
    assert [failure.container for failure in failures_of_containers(pod)] == [names.CONTAINER_TRAINER]


def test_amounts_and_deadlines_are_the_jobs() -> None:
    some = {"limits": {"cpu": 2, "memory": "4Gi"}}
    spec = trainer(
        prepareResources=some,
        schedulerResources={"requests": {"cpu": 1}},
        schedulerStartSeconds=7200,
        terminationGracePeriodSeconds=600,
    )
    assert named(spec, "prepare")["resources"] == {"limits": {"cpu": "2", "memory": "4Gi"}}
    assert named(spec, "scheduler")["resources"] == {"requests": {"cpu": "1"}}
    probe = named(spec, "scheduler")["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 7200
    assert spec["terminationGracePeriodSeconds"] == 600
    assert generator()["terminationGracePeriodSeconds"] == 90


def test_pods_are_spread_among_themselves_where_no_others_are_named() -> None:
    other = {"matchLabels": {"app": "x"}}
    found = [
        spec["topologySpreadConstraints"]
        for pods in (trainer, generator)
        for spec in [
            pods(
                topologySpreadConstraints=[
                    SPREAD | {"labelSelector": None},
                    SPREAD | {"topologyKey": "rack", "labelSelector": other},
                ]
            )
        ]
    ]
    own = {names.LABEL_JOB: "full", names.LABEL_ROLE: "trainer"}
    assert found[0] == [
        SPREAD | {"labelSelector": {"matchLabels": own}},
        SPREAD | {"topologyKey": "rack", "labelSelector": other},
    ]
    assert found[1][0]["labelSelector"]["matchLabels"][names.LABEL_POOL] == "fixed"


def test_the_account_has_the_jobs_name_and_annotations_and_no_token() -> None:
    document = full_document()
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"}
    document["spec"]["serviceAccount"] = {"name": "irsa", "annotations": role}
    objects = planned(parse_job(document))
    account = find(objects, "ServiceAccount", "irsa")
    assert account["metadata"]["annotations"].items() >= role.items()
    assert account["metadata"]["ownerReferences"][0]["name"] == "full"
    assert account["automountServiceAccountToken"] is False
    assert {spec["spec"]["serviceAccountName"] for _, spec in templates(objects)} == {"irsa"}
    assert "irsa" not in find(objects, "ConfigMap", "full-job")["data"][keys.FILE_JOB]


EKS, AZURE = "eks.amazonaws.com/skip-containers", "azure.workload.identity/skip-containers"


def trainer_annotations(document: dict[str, Any]) -> dict[str, str]:
    found = find(planned(parse_job(document)), "StatefulSet", "full-trainer")
    annotations: dict[str, str] = found["spec"]["template"]["metadata"]["annotations"]
    return annotations


def test_webhooks_of_clouds_are_told_to_give_the_users_code_no_token() -> None:
    document = full_document()
    assert trainer_annotations(document).items() >= {EKS: "tasks", AZURE: "tasks"}.items()
    document["spec"]["trainer"]["pod"]["annotations"] = {EKS: "mine,other", AZURE: "mine;other"}
    assert trainer_annotations(document).items() >= {EKS: "mine,other,tasks", AZURE: "mine;other;tasks"}.items()


def test_a_data_set_in_an_object_store_is_read_with_the_accounts_token() -> None:
    document = full_document()
    document["spec"]["task"]["dataset"]["jsonl"]["path"] = "s3://bucket/questions.jsonl"
    assert not {EKS, AZURE} & trainer_annotations(document).keys()
