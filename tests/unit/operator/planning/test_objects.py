"""What is planned for a job: which objects, with what in them, and always the same."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from streamrl import keys, names
from streamrl.spec import RLJob, parse_job
from streamrl.spec.rljob import GeneratorPoolSpec
from streamrl_operator.autoscaler.values import generator_name
from streamrl_operator.planning import pods
from streamrl_operator.planning.objects import pool_replicas
from streamrl_operator.planning.values import DesiredRun, WantedWorkload
from support.jobs import simulated_job
from support.planned import NAMESPACE, SETTINGS, UID, agents_document, find, full_document, full_job, planned

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "STREAMRL_UPDATE_SNAPSHOTS"
"""Set it to 1 to write the snapshots anew; then read the difference."""


def changed(path: str, value: object) -> RLJob:
    """The full job with one field of its spec set; `None` removes it."""
    document = full_document()
    *way, last = path.split(".")
    place: Any = document["spec"]
    for word in way:
        place = place[int(word)] if word.isdigit() else place.setdefault(word, {})
    if value is None:
        del place[last]
    else:
        place[last] = value
    return parse_job(document)


def differing(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Objects that are in one alone, or are not the same in both."""
    both = [{(each["kind"], each["metadata"]["name"]): each for each in objects} for objects in (before, after)]
    return {key for key in both[0] | both[1] if both[0].get(key) != both[1].get(key)}


@pytest.mark.parametrize(
    ("name", "job"),
    [("full", full_document()), ("simulated", simulated_job()), ("agents", agents_document())],
)
def test_objects_are_those_of_the_snapshot(name: str, job: dict[str, Any]) -> None:
    path, objects = SNAPSHOTS / f"{name}.yaml", planned(parse_job(job))
    if name == "agents":
        objects = [each for each in objects if names.pool("full", names.AGENTS) == each["metadata"]["name"]]
    if os.environ.get(UPDATE) == "1":
        yaml = YAML()
        yaml.width = 10_000
        with path.open("w", encoding="utf-8") as file:
            yaml.dump_all(objects, file)
    assert list(YAML(typ="safe").load_all(path)) == objects


def test_the_same_input_gives_the_same_bytes() -> None:
    assert json.dumps(planned(full_job())) == json.dumps(planned(full_job()))


def test_every_object_says_whose_it_is() -> None:
    for each in planned(full_job()):
        labels = each["metadata"]["labels"]
        assert each["metadata"]["namespace"] == NAMESPACE
        assert (labels[names.LABEL_JOB], labels[names.LABEL_JOB_UID]) == ("full", UID)
        assert labels[names.LABEL_MANAGED_BY] == names.MANAGED_BY


def test_all_go_with_the_job_but_a_claim_that_is_retained() -> None:
    ownerless = [each["metadata"]["name"] for each in planned(full_job()) if "ownerReferences" not in each["metadata"]]
    assert ownerless == ["full-checkpoints"]
    (owner,) = planned(full_job())[0]["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (UID, True, True)


@pytest.mark.parametrize(
    ("path", "value", "touched"),
    [
        ("suspend", True, set()),
        ("failurePolicy.maxRestarts", 9, set()),
        ("generators.1.pod.image", "x:2", {("StatefulSet", "full-auto")}),
        ("generators.1.scaling.auto.maxReplicas", 9, {("GeneratorPool", "full-auto")}),
        ("trainer.disruption", "Allow", {("ConfigMap", "full-job"), ("PodDisruptionBudget", "full-trainer")}),
        (
            "storage.checkpoints.whenDeleted",
            "Delete",
            {("ConfigMap", "full-job"), ("PersistentVolumeClaim", "full-checkpoints")},
        ),
        (
            "storage.checkpoints.claimName",
            "mine",
            {("ConfigMap", "full-job"), ("PersistentVolumeClaim", "full-checkpoints"), ("StatefulSet", "full-trainer")},
        ),
        (
            "storage.checkpoints.resumeFrom",
            {"claimName": "kept"},
            {("ConfigMap", "full-job"), ("PersistentVolumeClaim", "full-checkpoints"), ("StatefulSet", "full-trainer")},
        ),
        ("task.code", None, {("ConfigMap", "full-job"), ("StatefulSet", "full-trainer")}),
    ],
)
def test_an_edit_touches_no_more_than_it_must(path: str, value: object, touched: set[tuple[str, str]]) -> None:
    assert differing(planned(full_job()), planned(changed(path, value))) == touched


NODES = 3


def test_further_nodes_touch_these_objects() -> None:
    several = planned(changed("trainer.nodes", NODES))
    assert differing(planned(full_job()), several) == {
        ("ConfigMap", "full-job"),
        ("PersistentVolumeClaim", "full-checkpoints"),
        *(("NetworkPolicy", name) for name in ("full-trainer", "full-auto", "full-fixed", "full-free")),
        ("StatefulSet", "full-trainer"),
        *(
            (kind, "full-trainer-workers")
            for kind in ("StatefulSet", "Service", "NetworkPolicy", "PodDisruptionBudget")
        ),
    }
    assert find(several, "PersistentVolumeClaim", "full-checkpoints")["spec"]["accessModes"] == ["ReadWriteMany"]
    assert find(several, "PodDisruptionBudget", "full-trainer-workers")["spec"]["minAvailable"] == NODES - 1


@pytest.mark.parametrize(("trainers", "replicas"), [(1, NODES - 1), (0, 0)])
def test_they_come_and_go_with_the_first(trainers: int, replicas: int) -> None:
    objects = planned(changed("trainer.nodes", NODES), wanted=DesiredRun(trainers=trainers, generators={}))
    assert find(objects, "StatefulSet", "full-trainer-workers")["spec"]["replicas"] == replicas


def test_only_ranks_of_the_job_reach_ranks() -> None:
    objects = planned(changed("trainer.nodes", NODES))
    for name in ("full-trainer", "full-trainer-workers"):
        rules = find(objects, "NetworkPolicy", name)["spec"]["ingress"]
        (open_to_ranks,) = [rule for rule in rules if "ports" not in rule]
        (peer,) = open_to_ranks["from"]
        assert peer["podSelector"]["matchLabels"] == {names.LABEL_JOB: "full"}
        (roles,) = peer["podSelector"]["matchExpressions"]
        assert (roles["key"], roles["values"]) == (names.LABEL_ROLE, ["trainer", "trainer-worker"])
    alone = find(planned(full_job()), "NetworkPolicy", "full-trainer")["spec"]["ingress"]
    assert all("ports" in rule for rule in alone)


@pytest.mark.parametrize(
    ("wanted", "touched"),
    [
        (DesiredRun(trainers=0, generators={}), {"full-trainer", "full-fixed", "full-auto", "full-free"}),
        (DesiredRun(trainers=1, generators={"fixed": 3, "auto": 4, "free": 2}), {"full-auto"}),
        (
            DesiredRun(trainers=1, generators={"fixed": 3, "auto": 1, "free": 2}, restarted_at="2026-01-01T00:00:00Z"),
            {"full-trainer"},
        ),
        (DesiredRun(trainers=1, generators={"fixed": 3, "auto": 1, "free": 2}, requested={"auto": 7}), set()),
    ],
)
def test_what_should_run_changes_stateful_sets_alone(wanted: DesiredRun, touched: set[str]) -> None:
    changes = differing(planned(full_job()), planned(full_job(), wanted=replace(wanted, images=SETTINGS.images)))
    assert changes == {("StatefulSet", name) for name in touched}


def test_new_pods_of_a_held_set_wait_and_its_queue_is_asked_for_the_same() -> None:
    wanted = DesiredRun(trainers=1, generators={"auto": 1}, images=SETTINGS.images)
    workload = {"full": WantedWorkload(pool=None, about={}, counts={"auto": 1})}
    free, held = (
        planned(full_job(), wanted=replace(wanted, held=names_held, workloads=workload))
        for names_held in (frozenset(), frozenset({"full-auto"}))
    )
    assert differing(free, held) == {("StatefulSet", "full-auto")}
    spec = find(held, "StatefulSet", "full-auto")["spec"]
    assert spec["template"]["spec"]["schedulingGates"] == [{"name": names.GATE}]
    assert spec["updateStrategy"] == {"type": "OnDelete"}, "pods that run stay"


def test_pods_that_are_wanted() -> None:
    objects = planned(full_job(), wanted=DesiredRun(trainers=0, generators={"auto": 4}))
    sets = {each["metadata"]["name"]: each["spec"]["replicas"] for each in objects if each["kind"] == "StatefulSet"}
    assert sets == {"full-trainer": 0, "full-fixed": 0, "full-auto": 4, "full-free": 0}


def test_replicas_of_a_pool_are_an_object_of_their_own() -> None:
    pool = find(planned(full_job()), "GeneratorPool", "full-auto")
    built = pool_replicas(pool, replicas=4)
    assert built == {
        "apiVersion": pool["apiVersion"],
        "kind": "GeneratorPool",
        "metadata": {"name": "full-auto", "namespace": NAMESPACE},
        "spec": {"replicas": 4},
    }


@pytest.mark.parametrize("pool", ["fixed", "auto", "free"])
def test_a_pool_is_as_the_contract_says(pool: str) -> None:
    spec = find(planned(full_job()), "GeneratorPool", f"full-{pool}")["spec"]
    assert GeneratorPoolSpec.model_validate_json(json.dumps(spec)).role == pods.ROLE_GENERATOR


def test_workers_read_the_validated_job_without_what_may_change() -> None:
    text = find(planned(full_job()), "ConfigMap", "full-job")["data"][keys.FILE_JOB]
    read = parse_job(json.loads(text))
    spec = full_document()["spec"]
    lasting = [
        {key: pool[key] for key in ("name", "engine", "costPerHour") if key in pool} for pool in spec["generators"]
    ]
    trainer = {key: value for key, value in spec["trainer"].items() if key != "pod"}
    assert read.spec == parse_job({**full_document(), "spec": {**spec, "trainer": trainer, "generators": lasting}}).spec
    assert json.loads(text)["metadata"] == {"name": "full", "namespace": NAMESPACE}


def test_a_null_in_parameters_is_kept() -> None:
    dataset = {"reasoningGym": {"name": "chain_sum", "parameters": {"limit": None}}}
    document = full_document()
    document["spec"]["task"]["dataset"] = dataset
    text = find(planned(parse_job(document)), "ConfigMap", "full-job")["data"][keys.FILE_JOB]
    assert json.loads(text)["spec"]["task"]["dataset"] == dataset


def test_a_wish_keeps_the_claim_of_the_checkpoints_alone() -> None:
    job = changed("storage.checkpoints.whenDeleted", "Delete")
    begun = DesiredRun(trainers=0, generators={}, keeps_checkpoints=True, images=SETTINGS.images)
    kept = planned(job, wanted=begun)
    owned = {
        each["metadata"]["name"].rpartition("-")[2]: "ownerReferences" in each["metadata"]
        for each in kept
        if each["kind"] == "PersistentVolumeClaim"
    }
    assert owned == {"journal": True, "checkpoints": False}


def test_names_fit_where_they_are_longest() -> None:
    document = full_document()
    document["metadata"]["name"] = "j" * 32
    document["spec"]["generators"][0]["name"] = "p" * 11
    for each in planned(parse_job(document)):
        assert len(each["metadata"]["name"]) <= (52 if each["kind"] == "StatefulSet" else 63)
        assert all(len(value) <= 63 for value in each["metadata"]["labels"].values())


def test_pods_are_named_as_the_scaling_policy_expects() -> None:
    job, pool, ordinal = "full", "auto", 3
    pod = f"{find(planned(full_job()), 'StatefulSet', 'full-auto')['metadata']['name']}-{ordinal}"
    assert f"generator-{pod.removeprefix(f'{job}-')}" == generator_name(pool, ordinal=ordinal)


@pytest.mark.parametrize("name", names.OWN_SUFFIXES)
def test_a_pool_cannot_have_the_name_of_another_object(name: str) -> None:
    with pytest.raises(Exception, match="name must not be trainer, trainer-workers, scheduler, exposed"):
        changed("generators.0.name", name)


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


@pytest.mark.parametrize(
    ("engine", "endpoint", "share_percent", "port"),
    [
        ({"vllm": {}}, "http://collector.traces:4318/v1/traces", 10, 4318),
        ({"vllm": {}}, "https://collector.example/v1/traces", 10, 443),
        ({"vllm": {}}, "http://[fd00::1]:4319", 10, 4319),
        ({"vllm": {}}, "http://[1]", 10, 80),
        ({"vllm": {}}, "http://collector.traces:4318/v1/traces", 0, None),
        ({"hf": {}}, "http://collector.traces:4318/v1/traces", 10, None),
    ],
)
def test_generators_go_out_with_traces_of_their_own_alone(
    engine: dict[str, Any], endpoint: str, share_percent: int, port: int | None
) -> None:
    """Those of vLLM. All others are the scheduler's, whose pod may go anywhere."""
    document = full_document()
    document["spec"]["tracing"] = {"endpoint": endpoint, "sharePercent": share_percent}
    document["spec"]["generators"][0]["engine"] = engine
    egress = find(planned(parse_job(document)), "NetworkPolicy", "full-fixed")["spec"]["egress"]
    assert egress[3:] == ([] if port is None else [{"ports": [{"port": port, "protocol": "TCP"}]}])
