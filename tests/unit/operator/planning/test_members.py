"""Member clusters in a job's life: what is planned for one, what is refused, what its status and its pools say while one is lost."""

import copy
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from streamrl import names
from streamrl.clusters import Exposure, RLClusterSpec
from streamrl.spec import parse_job
from streamrl.spec.pod import CommonMetadata
from streamrl.status import ClusterStatus
from streamrl_operator.planning import job_status, members
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.members import addresses, anchor, owned_by
from streamrl_operator.planning.objects.shared import JobPlan, MemberPlace
from streamrl_operator.planning.values import DesiredRun, ExposedAddresses, MemberView, Observed
from support.observed_jobs import SETTINGS, all_ready, carried_out, generator, job_document, observed, page, trainer
from support.planned import NAMESPACE, UID, find, full_document

SNAPSHOT = Path(__file__).parent / "snapshots/member.yaml"
ADDRESS = Exposure.model_validate(
    {"address": {"host": "192.0.2.7", "scheduler_port": 443, "weights_port": 8443}}, by_name=True
)
NODE_PORT = Exposure.model_validate({"nodePort": {"host": "node.example"}})
GATEWAY = Exposure.model_validate(
    {"gateway": {"name": "edge", "namespace": "infra", "host": "edge.example", "port": 8443}}
)
BALANCER = Exposure.model_validate({"loadBalancer": {}})
PLACE = MemberPlace(
    cluster="east",
    namespace="team-a-pools",
    origin="u-home",
    leaves={"generator": {"ca.crt": "Y2E=", "tls.crt": "Y3J0", "tls.key": "a2V5"}},
)
DIALS = ExposedAddresses(scheduler="192.0.2.7:443", weights="192.0.2.7:8443")
VIEW = MemberView(cluster="east", cluster_uid="u-east", namespace="there", exposure=ADDRESS, made_generation=1)
LOST = replace(VIEW, unreachable="no answer")
ENTRY = ClusterStatus(name="east", cluster_uid="u-east", namespace="there")


def plan(**exposures: Exposure) -> JobPlan:
    """Of the full job, with its pool `fixed` in a member."""
    document = full_document()
    document["spec"]["generators"][0]["clusterName"] = "east"
    job = parse_job(document)
    wanted = DesiredRun(trainers=1, generators={"fixed": 3, "auto": 1, "free": 2}, images=SETTINGS.images)
    return JobPlan(job=job, namespace=NAMESPACE, uid=UID, wanted=wanted, settings=SETTINGS, exposures=exposures)


def test_labels_of_the_job_reach_a_member_and_its_annotations_do_not() -> None:
    """There an annotation could give the account a cloud's role, or an address a name, that is not the job's to take."""
    at = replace(plan(), place=PLACE, dials=DIALS)
    common = CommonMetadata(labels={"cost": "a"}, annotations={"eks.amazonaws.com/role-arn": "r"})
    spec = at.job.spec.model_copy(update={"common_metadata": common})
    objects = plan_objects(replace(at, job=at.job.model_copy(update={"spec": spec})))
    assert [each["metadata"]["labels"]["cost"] for each in objects] == ["a"] * len(objects)
    assert not any("eks.amazonaws.com/role-arn" in each["metadata"].get("annotations", {}) for each in objects)


def test_ways_in_have_the_administrators_annotations_alone() -> None:
    given = Exposure.model_validate({"loadBalancer": {"annotations": {"lb.example.com/internal": "true"}}})
    at = plan(east=given, west=GATEWAY)
    common = CommonMetadata(annotations={"lb.example.com/scheme": "internet-facing"})
    spec = at.job.spec.model_copy(update={"common_metadata": common})
    objects = plan_objects(replace(at, job=at.job.model_copy(update={"spec": spec})))
    ways = [each for each in objects if each["kind"] == "TLSRoute" or each["metadata"]["name"] == names.exposed("full")]
    assert len(ways) == 3
    found = [each["metadata"]["annotations"].keys() - {names.ANNOTATION_SPEC_HASH} for each in ways]
    assert sorted(found, key=len) == [set(), set(), {"lb.example.com/internal"}]


def there() -> list[dict[str, Any]]:
    at = replace(plan(), place=PLACE, dials=DIALS)
    return [anchor(at), *(owned_by("u-anchor", each) for each in plan_objects(at))]


def test_objects_in_a_member_are_those_of_the_snapshot() -> None:
    if os.environ.get("STREAMRL_UPDATE_SNAPSHOTS") == "1":
        yaml = YAML()
        yaml.width = 10_000
        with SNAPSHOT.open("w", encoding="utf-8") as file:
            yaml.dump_all(json.loads(json.dumps(there())), file)
    assert list(YAML(typ="safe").load_all(SNAPSHOT)) == there()


def test_all_in_a_member_says_where_it_is_from_and_is_owned_by_the_anchor_alone() -> None:
    first, *others = there()
    assert "ownerReferences" not in first["metadata"]
    for each in (first, *others):
        labels = each["metadata"]["labels"]
        assert each["metadata"]["namespace"] == PLACE.namespace
        assert (labels[names.LABEL_ORIGIN], labels[names.LABEL_HUB_NAMESPACE]) == ("u-home", NAMESPACE)
        assert (labels[names.LABEL_CLUSTER], labels[names.LABEL_JOB_UID]) == ("east", UID)
    assert {owner["uid"] for each in others for owner in each["metadata"]["ownerReferences"]} == {"u-anchor"}
    assert {owner["kind"] for each in others for owner in each["metadata"]["ownerReferences"]} == {"ConfigMap"}


def test_no_key_of_the_authority_and_no_account_of_the_job_goes_to_a_member() -> None:
    built = there()
    assert [each["metadata"]["name"] for each in built if each["kind"] == "Secret"] == ["full-tls-generator"]
    assert find(built, "ServiceAccount", "full-pods")["metadata"].get("annotations", {}).keys() <= {
        names.ANNOTATION_SPEC_HASH
    }


def test_a_pool_in_a_member_leaves_its_generator_pool_at_home() -> None:
    kinds = {each["kind"] for each in plan_objects(plan()) if each["metadata"]["name"] == "full-fixed"}
    assert kinds == {"GeneratorPool"}


def test_a_trainer_that_members_dial_takes_connections_from_anywhere() -> None:
    policy = find(plan_objects(plan()), "NetworkPolicy", "full-trainer")
    assert "from" not in policy["spec"]["ingress"][0]


def test_generators_in_a_member_go_out_to_one_another_and_to_the_exposed_addresses_alone() -> None:
    egress = find(there(), "NetworkPolicy", "full-fixed")["spec"]["egress"]
    ways = [(rule.get("to"), [port["port"] for port in rule["ports"]]) for rule in egress]
    block = [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
    peers = [{"podSelector": {"matchLabels": {"streamrl.io/job": "full", "streamrl.io/role": "generator"}}}]
    assert ways == [(block, [443]), (block, [8443]), (peers, [50052]), (None, [53, 53])]


@pytest.mark.parametrize(
    ("exposures", "kind"),
    [
        ({}, None),
        ({"east": ADDRESS}, None),
        ({"east": NODE_PORT}, "NodePort"),
        ({"a": NODE_PORT, "b": BALANCER}, "LoadBalancer"),
    ],
)
def test_home_has_a_service_for_members_where_one_is_needed(exposures: dict[str, Exposure], kind: str | None) -> None:
    found = [each for each in plan_objects(plan(**exposures)) if each["metadata"]["name"] == "full-exposed"]
    assert [each["spec"]["type"] for each in found] == ([] if kind is None else [kind])


def test_a_gateway_passes_the_jobs_two_names_through() -> None:
    found = [each for each in plan_objects(plan(east=GATEWAY, west=GATEWAY)) if each["kind"] == "TLSRoute"]
    assert [each["spec"]["hostnames"] for each in found] == [
        [f"scheduler.{UID[:8]}.streamrl.internal"],
        [f"weights.{UID[:8]}.streamrl.internal"],
    ]
    assert [each["spec"]["parentRefs"] for each in found] == [[{"namespace": "infra", "name": "edge"}]] * 2
    backends = [rule["backendRefs"] for each in found for rule in each["spec"]["rules"]]
    assert backends == [[{"name": "full-scheduler", "port": 50051}], [{"name": "full-scheduler", "port": 50052}]]
    assert not [each for each in plan_objects(plan(east=GATEWAY)) if each["metadata"]["name"] == "full-exposed"]


def test_no_pool_has_a_name_that_an_object_beside_it_has() -> None:
    several = plan(a=NODE_PORT, b=GATEWAY)
    trainer = several.job.spec.trainer.model_copy(update={"nodes": 2})
    spec = several.job.spec.model_copy(update={"trainer": trainer})
    at_home = plan_objects(replace(several, job=several.job.model_copy(update={"spec": spec})))
    for built in (at_home, there()):
        of_pools = {each["kind"] for each in built if names.LABEL_POOL in each["metadata"]["labels"]}
        own = {
            each["metadata"]["name"].removeprefix("full-")
            for each in built
            if each["kind"] in of_pools and names.LABEL_POOL not in each["metadata"]["labels"]
        }
        assert own <= set(names.OWN_SUFFIXES)
        assert built is not at_home or own == set(names.OWN_SUFFIXES)


PORTS = [{"name": "grpc", "nodePort": 30001}, {"name": "weights", "nodePort": 30002}]


@pytest.mark.parametrize(
    ("exposure", "exposed", "wanted"),
    [
        (ADDRESS, None, ("192.0.2.7:443", "192.0.2.7:8443")),
        (GATEWAY, None, ("edge.example:8443", "edge.example:8443")),
        (NODE_PORT, None, None),
        (NODE_PORT, {"spec": {"ports": [{"name": "grpc"}]}}, None),
        (NODE_PORT, {"spec": {"ports": PORTS}}, ("node.example:30001", "node.example:30002")),
        (BALANCER, {"spec": {}, "status": {"loadBalancer": {}}}, None),
        (
            BALANCER,
            {"status": {"loadBalancer": {"ingress": [{"ip": "2001:db8::1"}]}}},
            ("[2001:db8::1]:50051", "[2001:db8::1]:50052"),
        ),
    ],
)
def test_where_generators_dial(exposure: Exposure, exposed: Any, wanted: tuple[str, str] | None) -> None:
    found = addresses(exposure, exposed)
    assert (None if found is None else (found.scheduler, found.weights)) == wanted


POD_WITH = {
    "Secret in env": {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
    "Secret in envFrom": {"envFrom": [{"secretRef": {"name": "s"}}]},
    "pull Secret": {"imagePullSecrets": ["s"]},
    "Secret as a volume": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]},
    "projected Secret": {"volumes": [{"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}]}}]},
    "claim": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "s"}}]},
    "Secret of a CSI driver": {
        "volumes": [{"name": "v", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "s"}}}]
    },
    "Secret in a CSI driver's attributes": {
        "volumes": [{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"secretname": "s"}}}]
    },
    "Secret in its attributes, with dashes": {
        "volumes": [{"name": "v", "csi": {"driver": "d", "volumeAttributes": {"csi.example.com/secret-name": "s"}}}]
    },
    "claim that is copied": {
        "volumes": [
            {
                "name": "v",
                "ephemeral": {
                    "volumeClaimTemplate": {
                        "spec": {
                            "dataSource": {"kind": "PersistentVolumeClaim", "name": "s"},
                            "accessModes": ["ReadWriteOnce"],
                        }
                    }
                },
            }
        ]
    },
    "Secret of a container before ours": {
        "initContainers": [{"name": "c", "image": "i", "envFrom": [{"secretRef": {"name": "s"}}]}]
    },
    "Secret of a container beside": {
        "containers": [
            {
                "name": "c",
                "image": "i",
                "env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            }
        ]
    },
}


def far_document(**changes: Any) -> dict[str, Any]:
    """A job whose one pool is in a member."""
    document = job_document(**changes)
    document["spec"]["generators"][0]["clusterName"] = "east"
    return document


def told(view: MemberView | None, *, pod: dict[str, Any] | None = None, queue: str = "") -> str:
    document = far_document()
    document["spec"]["generators"][0]["pod"] = pod or {}
    job = observed(document).job
    assert job is not None
    found = members.refused(job, namespace="default", queue=queue, members={"east": view} if view else {})
    return "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("view", "queue", "words"),
    [
        (VIEW, "", ""),
        (None, "", "must name an RLCluster that is there, got 'east'"),
        (replace(VIEW, exposure=None, unreachable="there is no RLCluster east"), "", "there is no RLCluster east"),
        (replace(VIEW, namespace=""), "", "must be a cluster that jobs of namespace default may use, got 'east'"),
        (VIEW, "gpus", "must be absent in a job with a queue (gpus)"),
        (LOST, "", ""),
    ],
)
def test_which_jobs_may_be_in_a_member(view: MemberView | None, queue: str, words: str) -> None:
    assert words in told(view, queue=queue)
    assert bool(words) == bool(told(view, queue=queue))


@pytest.mark.parametrize("case", POD_WITH)
def test_secrets_and_claims_of_a_member_are_named_only_where_they_are_allowed(case: str) -> None:
    assert "spec.generators[0].pod: names a" in told(VIEW, pod=POD_WITH[case])
    assert told(replace(VIEW, allowed_secrets=("s",), allowed_claims=("s",)), pod=POD_WITH[case]) == ""


def look(view: MemberView = VIEW, **changes: Any) -> Observed:
    """A job with its one pool in a member."""
    return observed(far_document(), members={"east": view}, **changes)


def settled(view: MemberView = VIEW, **changes: Any) -> Observed:
    """The same when it runs."""
    first = look(pods=all_ready(2), **changes)
    first = carried_out(first, decide(first, settings=SETTINGS))
    first = carried_out(first, decide(first, settings=SETTINGS), seconds=1)
    return replace(first, members={"east": view})


def test_a_member_is_in_the_status_before_it_is_told_anything() -> None:
    status = decide(look(), settings=SETTINGS).status
    assert status["clusters"] == [{"name": "east", "clusterUid": "u-east", "namespace": "there"}]


@pytest.mark.parametrize(
    ("view", "annotations", "done"),
    [
        (VIEW, {}, False),
        (replace(VIEW, is_clean=True), {}, True),
        (replace(LOST, is_clean=True), {}, False),
        (replace(VIEW, cluster_uid="u-other"), {}, True),
        (replace(LOST, cluster_uid="u-other"), {}, False),
        (LOST, {names.ANNOTATION_ABANDON: "west, east"}, True),
        (LOST, {names.ANNOTATION_ABANDON: "west"}, False),
    ],
)
def test_what_a_deletion_waits_for(view: MemberView, annotations: dict[str, str], done: bool) -> None:
    document = far_document()
    document["metadata"] |= {"annotations": annotations, "deletionTimestamp": "2026-01-01T12:00:00Z"}
    assert members.is_done(ENTRY, observed(document, members={"east": view})) is done


def test_a_deletion_waits_for_no_member_that_was_never_reached() -> None:
    document = far_document()
    document["metadata"]["deletionTimestamp"] = "2026-01-01T12:00:00Z"
    never = ENTRY.model_copy(update={"cluster_uid": ""})
    assert members.is_done(never, observed(document, members={"east": replace(LOST, cluster_uid="")}))


def test_a_lost_member_freezes_its_pools_and_says_so() -> None:
    before = settled()
    lost = replace(before, members={"east": LOST}, numbers=page())
    decision = decide(lost, settings=SETTINGS)
    pool = decision.pool_statuses["sim"]
    (ready,) = pool["conditions"]
    assert (ready["status"], ready["reason"]) == ("Unknown", "ClusterUnreachable")
    assert pool["readyReplicas"] == 3  # as the scheduler hears them
    assert decision.wanted.generators == decide(before, settings=SETTINGS).wanted.generators
    found = {one["type"]: one for one in decision.status["conditions"]}
    assert found["ClusterUnreachable"]["status"] == "True"
    assert "cluster east: no answer" in found["ClusterUnreachable"]["message"]
    assert found["Ready"]["status"] == "True"
    assert decision.status.get("restarts", 0) == 0


@pytest.mark.parametrize(
    ("seen", "was", "said"),
    [
        ([], None, ("Unknown", "nobody knows whether pods are left: cluster east: no answer")),
        (
            [generator()],
            None,
            ("False", "waits for 1 pods to end, the first is simulated-sim-0; cluster east: no answer"),
        ),
        ([], "True", ("True", "no pods; volumes stay")),
    ],
    ids=["never asked", "as it was seen last", "it was known before"],
)
def test_a_suspended_job_says_no_pods_only_where_it_is_known(
    seen: list[dict[str, Any]], was: str | None, said: tuple[str, str]
) -> None:
    status: dict[str, Any] = {"clusters": [ENTRY.model_dump(by_alias=True, exclude_none=True)]}
    if was is not None:
        suspended = {"type": "Suspended", "status": was, "reason": "Suspended", "message": "no pods; volumes stay"}
        status["conditions"] = [suspended | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]
    document = far_document(status=status)
    document["spec"]["suspend"] = True
    decision = decide(observed(document, members={"east": LOST}, pods=seen), settings=SETTINGS)
    found = {one["type"]: one for one in decision.status["conditions"]}
    assert (found["Suspended"]["status"], found["Suspended"]["message"]) == said
    assert decision.events == () or was == "True"


@pytest.mark.parametrize(
    ("view", "moves", "held"),
    [(VIEW, False, False), (LOST, False, True), (LOST, True, False)],
    ids=["reached", "lost", "lost and left"],
)
def test_a_changed_spec_waits_for_a_member_whose_pods_nobody_knows(view: MemberView, moves: bool, held: bool) -> None:
    before = settled()
    spec = copy.deepcopy(before.raw["spec"])
    spec["pipeline"]["batchGroups"] = 7
    if moves:
        del spec["generators"][0]["clusterName"]
    changed = {**before.raw, "spec": spec}
    look = observed(changed, resolved=before.resolved, members={"east": view}, pods=[])
    assert decide(look, settings=SETTINGS).stops_first is held


def test_a_lost_member_whose_pods_nobody_has_seen_counts_as_it_was() -> None:
    before = settled()
    pool = decide(before, settings=SETTINGS).pool_statuses["sim"]
    lost = replace(before, members={"east": LOST}, pods=[trainer()])
    assert decide(lost, settings=SETTINGS).pool_statuses["sim"]["readyReplicas"] == pool["readyReplicas"]


def test_a_member_that_comes_back_is_as_any_other_pool() -> None:
    lost = settled(LOST)
    lost = carried_out(lost, decide(lost, settings=SETTINGS))
    decision = decide(replace(lost, members={"east": VIEW}), settings=SETTINGS)
    assert [one["reason"] for one in decision.pool_statuses["sim"]["conditions"]] == ["AllReady"]
    found = {one["type"]: one["status"] for one in decision.status["conditions"]}
    assert found["ClusterUnreachable"] == "False"


def test_an_entry_goes_when_its_pools_have_moved_and_nothing_is_clean() -> None:
    stays = settled()
    moved = job_document(status=dict(stays.raw["status"]))
    for is_clean in (False, True):
        seen = observed(moved, members={"east": replace(VIEW, is_clean=is_clean)})
        assert bool(decide(seen, settings=SETTINGS).status.get("clusters")) is not is_clean


def test_a_member_that_is_another_cluster_now_is_written_down_anew() -> None:
    status = decide(replace(settled(), members={"east": replace(VIEW, cluster_uid="u-2")}), settings=SETTINGS).status
    assert [one["clusterUid"] for one in status["clusters"]] == ["u-2"]


def test_what_a_member_refuses_is_said_at_home() -> None:
    decision = decide(settled(replace(VIEW, refused="exceeded quota")), settings=SETTINGS)
    ready = next(one for one in decision.status["conditions"] if one["type"] == "Ready")
    assert "cluster east: exceeded quota" in ready["message"]
    assert job_status.read_job_status({"status": decision.status}).conditions


def test_a_namespace_has_one_place_in_a_member() -> None:
    document = {
        "source": {"kubeconfigSecretName": "s"},
        "exposure": {"address": {"host": "h"}},
        "namespaces": [{"hub": "a", "member": "x"}, {"hub": "b", "member": "x"}],
    }
    with pytest.raises(ValueError, match="each member namespace once"):
        RLClusterSpec.model_validate_json(json.dumps(document))
