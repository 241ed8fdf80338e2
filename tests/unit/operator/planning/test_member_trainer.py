"""A trainer in a member cluster: what is planned where, who dials whom, what is refused, and what its job says while the member is lost."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from streamrl import names
from streamrl.clusters import Exposure, Trainers
from streamrl.spec import RLJob, parse_job
from streamrl_operator.planning import members
from streamrl_operator.planning.certificates import roles_of
from streamrl_operator.planning.life import decide
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.shared import JobPlan, MemberPlace, kept_claims
from streamrl_operator.planning.values import DesiredRun, ExposedAddresses, MemberView, Observed
from support.observed_jobs import SETTINGS, all_ready, carried_out, job_document, observed, page, pod, trainer
from support.planned import NAMESPACE, UID, find, full_document

ADDRESS = Exposure.model_validate({"address": {"host": "192.0.2.7"}})
NODE_PORT = Exposure.model_validate({"nodePort": {"host": "node.example"}})
DIALS = ExposedAddresses(scheduler="192.0.2.7:443", weights="192.0.2.7:443")
PLACE = MemberPlace(
    cluster="east",
    namespace="there",
    origin="u-home",
    leaves={role: {"tls.crt": "Y3J0"} for role in ("scheduler", "trainer")},
    code={"metadata": {"name": "full-code", "labels": {"a": "b"}}, "data": {"rewards.py": "..."}},
)
VIEW = MemberView(
    cluster="east",
    cluster_uid="u-east",
    made_generation=1,
    namespace="there",
    exposure=ADDRESS,
    trainers=Trainers(exposure=NODE_PORT),
    allowed_secrets=("hub", "registry"),
    allowed_claims=("data",),
)
LOST = replace(VIEW, unreachable="no answer")
WEST = replace(VIEW, cluster="west", trainers=None)


def far_job(trainer: str | None = "east", **pools: str) -> RLJob:
    """The full job with its trainer in a member; `pools`: pool -> the member that it is in."""
    document = full_document()
    document["spec"]["trainer"] |= {} if trainer is None else {"clusterName": trainer}
    for pool in document["spec"]["generators"]:
        pool.update({"clusterName": pools[pool["name"]]} if pool["name"] in pools else {})
    return parse_job(document)


def plan(job: RLJob, **changes: Any) -> JobPlan:
    sizes = {pool.name: 2 for pool in job.spec.generators}
    wanted = DesiredRun(trainers=1, generators=sizes, images=SETTINGS.images)
    return JobPlan(job=job, namespace=NAMESPACE, uid=UID, wanted=wanted, settings=SETTINGS, **changes)


def names_of(objects: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in objects}


def parts(obj: Mapping[str, Any]) -> dict[str, Any]:
    """All but the metadata, and in a pod template too, which says where it is."""
    bare = copy.deepcopy({key: value for key, value in obj.items() if key != "metadata"})
    if obj["kind"] == "StatefulSet":
        del bare["spec"]["template"]["metadata"]["labels"]
    return bare


def test_a_trainer_has_the_same_in_a_member_as_at_home() -> None:
    at_home = {(each["kind"], each["metadata"]["name"]): each for each in plan_objects(plan(far_job(None)))}
    there = plan_objects(plan(far_job(), place=PLACE))
    left = plan_objects(plan(far_job(), dials=DIALS))
    copied = {("ConfigMap", "full-code"), *(("Secret", f"full-tls-{role}") for role in ("scheduler", "trainer"))}
    shared = {("ServiceAccount", "full-pods"), ("ConfigMap", "full-job")}
    assert names_of(there) == at_home.keys() - (names_of(left) - shared) | shared | copied
    assert names_of(there) & names_of(left) == shared
    for each in there:
        key = each["kind"], each["metadata"]["name"]
        if key in copied | shared or each["kind"] == "NetworkPolicy":
            continue
        assert parts(each) == parts(at_home[key]), key


def test_no_key_of_the_authority_goes_there_and_the_modules_do() -> None:
    there = plan_objects(plan(far_job(), place=PLACE))
    assert ("Secret", "full-ca") not in names_of(there)
    code = find(there, "ConfigMap", "full-code")
    assert (code["data"], code["metadata"]["labels"].get("a")) == ({"rewards.py": "..."}, None)
    assert names.LABEL_ORIGIN in code["metadata"]["labels"]


def environment(objects: list[dict[str, Any]], name: str) -> dict[str, str]:
    """Of the generators of a StatefulSet."""
    (container, *_) = find(objects, "StatefulSet", name)["spec"]["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "value" in one}


def test_a_pool_at_home_dials_the_members_exposure_and_goes_out_to_nothing_else() -> None:
    home = plan_objects(plan(far_job(), dials=DIALS))
    found = environment(home, "full-fixed")
    assert found["STREAMRL_CLUSTER"] == "home"
    assert (found["STREAMRL_SCHEDULER_ADDRESS"], found["STREAMRL_WEIGHTS_ADDRESS"]) == (DIALS.scheduler, DIALS.weights)
    assert found["STREAMRL_SCHEDULER_TLS_NAME"] == f"scheduler.{UID[:8]}.streamrl.internal"
    first, *_ = find(home, "NetworkPolicy", "full-fixed")["spec"]["egress"]
    assert first["to"] == [{"ipBlock": {"cidr": "192.0.2.7/32"}}]
    policy = find(plan_objects(plan(far_job(), place=PLACE)), "NetworkPolicy", "full-trainer")
    assert "from" not in policy["spec"]["ingress"][0]


def test_a_pool_at_home_has_no_pods_while_nobody_knows_where_they_would_dial() -> None:
    home = names_of(plan_objects(plan(far_job())))
    assert ("GeneratorPool", "full-fixed") in home
    assert not [name for kind, name in home if kind in ("StatefulSet", "Service", "PersistentVolumeClaim")]


def test_a_pool_beside_the_trainer_dials_its_service_as_at_home() -> None:
    job = far_job(fixed="east", auto="east", free="east")
    there = plan_objects(plan(job, place=PLACE))
    assert environment(there, "full-fixed") == environment(plan_objects(plan(far_job(None))), "full-fixed")
    assert "from" in find(there, "NetworkPolicy", "full-trainer")["spec"]["ingress"][0]


def test_the_service_for_other_clusters_is_where_the_trainer_is() -> None:
    exposures = members.exposures(far_job(), {"east": VIEW})
    there = plan_objects(plan(far_job(), place=PLACE, exposures=exposures))
    assert find(there, "Service", "full-exposed")["spec"]["type"] == "NodePort"
    assert ("Service", "full-exposed") not in names_of(plan_objects(plan(far_job(), dials=DIALS, exposures=exposures)))


@pytest.mark.parametrize(
    ("trainer", "pools", "wanted"),
    [
        (None, {}, {}),
        (None, {"fixed": "west"}, {"west": ADDRESS}),
        ("east", {}, {"": NODE_PORT}),
        ("east", {"fixed": "west"}, {"": NODE_PORT, "west": NODE_PORT}),
        ("east", {"fixed": "east", "auto": "west", "free": "west"}, {"west": NODE_PORT}),
        ("east", {"fixed": "east", "auto": "east", "free": "east"}, {}),
    ],
)
def test_who_reaches_the_scheduler_by_which_exposure(
    trainer: str | None, pools: dict[str, str], wanted: dict[str, Exposure]
) -> None:
    job = far_job(trainer, **pools)
    assert members.exposures(job, {"east": VIEW, "west": WEST}) == wanted
    assert job.spec.other_clusters == sorted(name or names.HOME for name in wanted)


def test_each_cluster_has_the_leaves_of_its_pods() -> None:
    job = far_job(fixed="east", auto="west")
    assert members.leaves_in(job, "east") == {
        "generator/east": "generator",
        "scheduler": "scheduler",
        "trainer": "trainer",
    }
    assert members.leaves_in(job, "west") == {"generator/west": "generator"}
    assert roles_of(job) == ("scheduler", "trainer", "generator", "generator/east", "generator/west")
    assert members.clusters_of(far_job()) == ["east"]
    assert roles_of(far_job()) == ("scheduler", "trainer", "generator")


@pytest.mark.parametrize(
    ("journal", "checkpoints", "wish", "kept"),
    [
        ("Delete", "Delete", False, set()),
        ("Delete", "Retain", False, {"full-checkpoints"}),
        ("Retain", "Delete", False, {"full-journal"}),
        ("Delete", "Delete", True, {"full-checkpoints"}),
    ],
)
def test_which_claims_outlive_the_job(journal: str, checkpoints: str, kept: set[str], *, wish: bool) -> None:
    document = full_document()
    document["spec"]["storage"] = {"journal": {"whenDeleted": journal}, "checkpoints": {"whenDeleted": checkpoints}}
    made = plan(parse_job(document))
    made = replace(made, wanted=replace(made.wanted, keeps_checkpoints=wish))
    assert kept_claims(made) == kept
    claims = [each for each in plan_objects(made) if each["kind"] == "PersistentVolumeClaim"]
    assert {one["metadata"]["name"] for one in claims if "ownerReferences" not in one["metadata"]} == kept


def told(job: RLJob, view: MemberView | None = VIEW, *, queue: str = "", **others: MemberView) -> list[str]:
    views = {**({"east": view} if view else {}), **others}
    return [str(one) for one in members.refused(job, namespace=NAMESPACE, queue=queue, members=views)]


def with_claim(**checkpoints: Any) -> RLJob:
    document = full_document()
    document["spec"]["trainer"]["clusterName"] = "east"
    document["spec"]["storage"] = {"checkpoints": checkpoints}
    return parse_job(document)


@pytest.mark.parametrize(
    ("job", "view", "queue", "words"),
    [
        (far_job(), VIEW, "", None),
        (far_job(), LOST, "", None),
        (far_job(), None, "", "clusterName: must name an RLCluster that is there, got 'east'"),
        (far_job(), replace(VIEW, namespace=""), "", f"must be a cluster that jobs of namespace {NAMESPACE} may use"),
        (far_job(), VIEW, "gpus", "clusterName: must be absent in a job with a queue (gpus)"),
        (far_job(), replace(VIEW, trainers=None), "", "clusterName: must be a cluster that takes trainers"),
        (
            far_job(),
            replace(VIEW, trainers=Trainers()),
            "",
            "clusterName: must be a cluster whose schedulers generators in home can reach",
        ),
        (far_job(fixed="east", auto="east", free="east"), replace(VIEW, trainers=Trainers()), "", None),
        (far_job(), replace(VIEW, allowed_secrets=("registry",)), "", "trainer.pod: names a Secret of cluster east"),
        (far_job(), replace(VIEW, allowed_claims=()), "", "trainer.pod: names a claim of cluster east"),
        (with_claim(claimName="mine"), VIEW, "", "storage.checkpoints.claimName: names a claim of cluster east"),
        (with_claim(claimName="data"), VIEW, "", None),
        (
            with_claim(resumeFrom={"claimName": "old"}),
            VIEW,
            "",
            "storage.checkpoints.resumeFrom: names a claim of cluster east",
        ),
    ],
)
def test_which_trainers_may_be_in_a_member(job: RLJob, view: MemberView | None, queue: str, words: str | None) -> None:
    found = told(job, view, queue=queue)
    assert [words in one for one in found if words] == [True] * len(found)
    assert bool(found) is (words is not None)


def test_a_member_is_not_called_as_the_jobs_own_cluster() -> None:
    (found,) = told(far_job(fixed="home"), home=replace(VIEW, cluster="home"))
    assert "must be absent with a pool in an RLCluster called home" in found


def far_document(**changes: Any) -> dict[str, Any]:
    document = job_document(**changes)
    document["spec"]["trainer"]["clusterName"] = "east"
    return document


def settled(view: MemberView = VIEW) -> Observed:
    """A job that runs, with its trainer in a member and its pool at home."""
    ports = [{"name": "grpc", "nodePort": 30001}, {"name": "weights", "nodePort": 30002}]
    exposed = {"spec": {"ports": ports}}
    first = observed(far_document(), members={"east": VIEW}, pods=all_ready(2), exposed=exposed)
    first = carried_out(first, decide(first, settings=SETTINGS))
    first = carried_out(first, decide(first, settings=SETTINGS), seconds=1)
    return replace(first, members={"east": view})


def conditions_of(status: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


@pytest.mark.parametrize("is_seen", [True, False], ids=["as it was known", "by an operator that is new"])
def test_a_job_whose_trainer_is_out_of_sight_goes_on_and_says_so(*, is_seen: bool) -> None:
    before = settled()
    lost = replace(before, members={"east": LOST}, numbers=None)
    lost = (
        lost if is_seen else replace(lost, pods=[one for one in lost.pods if "trainer" not in pod_name(one)], sets={})
    )
    decision = decide(lost, settings=SETTINGS)
    assert decision.wanted == decide(before, settings=SETTINGS).wanted
    assert (decision.delete_pods, decision.has_ended, decision.stops_first) == ((), False, False)
    found = conditions_of(decision.status)
    assert found["Ready"] == ("Unknown", "ClusterUnreachable")
    assert found["ClusterUnreachable"] == ("True", "ClusterUnreachable")
    assert decision.status.get("restarts", 0) == 0
    again = decide(replace(carried_out(lost, decision), members={"east": VIEW}, pods=before.pods), settings=SETTINGS)
    assert conditions_of(again.status)["Ready"] == ("True", "Running")


def pod_name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def test_a_job_that_is_refused_meanwhile_keeps_a_trainer_that_nobody_sees() -> None:
    lost = replace(settled(LOST), job=None, invalid="no", invalid_reason="ClusterNotAllowed", sets={}, pods=[])
    assert decide(lost, settings=SETTINGS).wanted.any_pods
    halted = copy.deepcopy(dict(lost.raw))
    halted["spec"]["suspend"] = True
    assert not decide(replace(lost, raw=halted), settings=SETTINGS).wanted.any_pods


def test_what_the_member_refuses_of_the_trainer_is_said() -> None:
    refused = replace(settled(replace(VIEW, refused="exceeded quota")), pods=[], sets={})
    decision = decide(refused, settings=SETTINGS)
    (ready,) = (one for one in decision.status["conditions"] if one["type"] == "Ready")
    assert (ready["reason"], ready["message"]) == ("ClusterRefused", "cluster east: exceeded quota")


def test_the_end_is_that_of_the_schedulers_result_wherever_it_is() -> None:
    ended = replace(settled(), numbers=page(result={"status": "succeeded", "steps": 20}))
    decision = decide(ended, settings=SETTINGS)
    assert (decision.has_ended, decision.has_succeeded, decision.wanted.any_pods) == (True, True, False)


def test_an_end_is_written_while_the_member_is_lost_too() -> None:
    document = far_document(status=dict(settled().raw["status"]), activeDeadlineSeconds=1)
    late = observed(document, members={"east": LOST}, pods=[trainer(), pod("simulated-sim-0")])
    late = replace(late, now=late.now.replace(year=late.now.year + 1))
    assert conditions_of(decide(late, settings=SETTINGS).status)["Failed"] == ("True", "DeadlineExceeded")
