"""The operator, as a real process, at a real API server: what it makes, undoes, leaves alone, and leaves behind.

There are no kubelets here: pods stay pending, and their status is written by the test where it matters.
"""

import base64
import copy
from typing import Any

import pytest
from cryptography import x509

from cluster.harness.control_plane import ControlPlane
from cluster.operators import RESYNC_S, SOON_S, Lab, Operator, writes
from streamrl import names
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(300)

JOB = "sums"


def job(**spec: Any) -> dict[str, Any]:
    """A job with a pool of each kind of scaling."""
    document = simulated_job()
    document["metadata"]["name"] = JOB
    engine = document["spec"]["generators"][0]["engine"]
    document["spec"]["generators"] = [
        {"name": "fixed", "engine": engine, "scaling": {"static": {"replicas": 2}}},
        {"name": "auto", "engine": engine, "scaling": {"auto": {"maxReplicas": 4}}},
        {"name": "free", "engine": engine, "scaling": {"external": {"initialReplicas": 3}}},
    ]
    document["spec"] |= spec
    return document


POOLS = {f"{JOB}-fixed", f"{JOB}-auto", f"{JOB}-free"}
MADE = {
    "serviceaccounts": {f"{JOB}-pods"},
    "configmaps": {f"{JOB}-job"},
    "secrets": {f"{JOB}-ca", *(f"{JOB}-tls-{role}" for role in ("scheduler", "trainer", "generator"))},
    "services": {f"{JOB}-scheduler", f"{JOB}-trainer", *POOLS},
    "persistentvolumeclaims": {f"{JOB}-journal", f"{JOB}-checkpoints"},
    "networkpolicies": {f"{JOB}-trainer", *POOLS},
    "poddisruptionbudgets": POOLS,
    "statefulsets": {f"{JOB}-trainer", *POOLS},
    "generatorpools": POOLS,
}
NOTHING: dict[str, set[str]] = {plural: set() for plural in MADE}
KEPT = NOTHING | {"persistentvolumeclaims": {f"{JOB}-checkpoints"}}


def replicas(lab: Lab, *, of: str = "statefulsets") -> dict[str, int]:
    """Replicas by the name's last part."""
    found = [each for each in lab.list(of) if each["metadata"]["name"].startswith(f"{JOB}-")]
    return {each["metadata"]["name"].rpartition("-")[2]: each["spec"]["replicas"] for each in found}


RUNNING = {"trainer": 1, "fixed": 2, "auto": 1, "free": 3}
STOPPED = dict.fromkeys(RUNNING, 0)


def settle(lab: Lab, operator: Operator) -> None:
    """Until the objects and pods are there, the status is written, and two looks found nothing to do."""
    lab.wait(
        lambda: lab.made(JOB) == MADE and replicas(lab) == RUNNING and bool(lab.condition(JOB, "Ready")),
        f"the objects of {JOB}",
        operator,
    )
    lab.wait(lambda: len(lab.list("pods")) == sum(RUNNING.values()), f"the pods of {JOB}", operator)
    lab.wait_until_quiet(JOB, operator)


def start(lab: Lab, operator: Operator, **spec: Any) -> dict[str, Any]:
    """A job that is settled."""
    lab.create("rljobs", job(**spec))
    settle(lab, operator)
    return lab.must("rljobs", JOB)


def test_makes_what_a_job_needs(lab: Lab, operator: Operator) -> None:
    made = start(lab, operator)
    uid = made["metadata"]["uid"]
    assert names.FINALIZER in made["metadata"]["finalizers"]
    for plural, wanted in MADE.items():
        for name in wanted - {f"{JOB}-checkpoints"}:
            owner = lab.must(plural, name)["metadata"]["ownerReferences"][0]
            assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("RLJob", JOB, uid, True)
    assert "ownerReferences" not in lab.must("persistentvolumeclaims", f"{JOB}-checkpoints")["metadata"]  # is kept
    assert replicas(lab, of="generatorpools") == {"fixed": 2, "auto": 1, "free": 3}
    conditions = {each["type"]: each["status"] for each in made["status"]["conditions"]}
    held = {kind for kind, status in conditions.items() if status != "False"}
    assert (len(conditions), held) == (6, {"Reconciling"})
    assert made["status"]["observedGeneration"] == made["metadata"]["generation"]
    assert lab.must("generatorpools", f"{JOB}-free")["status"]["desiredReplicas"] == 3
    reasons = {event["reason"] for event in lab.list("events") if event["regarding"].get("name") == JOB}
    assert "Started" in reasons
    leaf = base64.b64decode(lab.must("secrets", f"{JOB}-tls-scheduler")["data"]["tls.crt"])
    found = x509.load_pem_x509_certificate(leaf).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert f"{JOB}-scheduler.{lab.namespace}.svc" in found.get_values_for_type(x509.DNSName)


def test_labels_and_annotations_that_the_job_lists_are_on_each_object(lab: Lab, operator: Operator) -> None:
    """They come, change and go with the list; the pods are not made again."""
    common = {"labels": {"cost": "a", "gone": "x"}, "annotations": {"example.com/owner": "team"}}
    start(lab, operator, commonMetadata=common)
    before = {each["metadata"]["uid"] for each in lab.list("pods")}

    def metadata() -> list[dict[str, Any]]:
        return [lab.must(plural, name)["metadata"] for plural, made in MADE.items() for name in made]

    assert {each["labels"]["cost"] for each in metadata()} == {"a"}
    assert {each["annotations"]["example.com/owner"] for each in metadata()} == {"team"}
    lab.patch("rljobs", JOB, {"spec": {"commonMetadata": {"labels": {"cost": "b", "gone": None}, "annotations": None}}})
    lab.wait(
        lambda: all(
            (each["labels"].get("cost"), "gone" in each["labels"], "example.com/owner" in each["annotations"])
            == ("b", False, False)
            for each in metadata()
        ),
        "the new labels alone",
        operator,
    )
    assert {each["metadata"]["uid"] for each in lab.list("pods")} == before


def test_at_rest_it_only_watches(lab: Lab, operator: Operator, own_control_plane: ControlPlane) -> None:
    start(lab, operator)
    before, versions = writes(own_control_plane, lab.namespace), lab.versions(JOB)
    asked = operator.metric("streamrl_operator_api_requests_total")
    operator.wait_for_looks(2, deadline_s=10 * RESYNC_S + SOON_S)
    assert writes(own_control_plane, lab.namespace)[len(before) :] == []
    assert lab.versions(JOB) == versions
    # Two resyncs last four seconds: a few renewals of the Lease (a read and a write), and nothing for each job.
    assert operator.metric("streamrl_operator_api_requests_total") - asked <= 24


def test_each_write_of_the_first_visit_is_needed(lab: Lab, operator: Operator, own_control_plane: ControlPlane) -> None:
    start(lab, operator)
    done = writes(own_control_plane, lab.namespace)
    applied = [line for line in done if line.startswith(("create", "patch")) and " events " not in line]
    # Jobs and pools have a status too, which follows what is seen meanwhile; all else is written once, and a pool's StatefulSet once more
    # when the trainer is ready.
    once = [line for line in applied if line.split()[1].split("/")[0] not in ("rljobs", "generatorpools")]
    made = sum(len(each) for plural, each in MADE.items() if plural != "generatorpools")
    assert len(once) == len(set(once)) == made + len(POOLS)
    assert all(line.endswith((" 200", " 201")) for line in applied), done


EDITS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "service": ("services", f"{JOB}-scheduler", {"spec": {"publishNotReadyAddresses": False}}),
    "labels": ("networkpolicies", f"{JOB}-trainer", {"metadata": {"labels": {names.LABEL_JOB_UID: "other"}}}),
    "owner": ("configmaps", f"{JOB}-job", {"metadata": {"ownerReferences": None}}),
    "replicas": ("statefulsets", f"{JOB}-fixed", {"spec": {"replicas": 7}}),
    "static pool": ("generatorpools", f"{JOB}-fixed", {"spec": {"replicas": 7}}),
    "certificate": ("secrets", f"{JOB}-tls-trainer", {"data": {"tls.crt": "bm9uZQ=="}}),
    "job label": ("services", f"{JOB}-fixed", {"metadata": {"labels": {names.LABEL_JOB: None}}}),
    "secret's job label": ("secrets", f"{JOB}-ca", {"metadata": {"labels": {names.LABEL_JOB: None}}}),
}


def test_what_somebody_edits_is_put_right(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    authority = lab.must("secrets", f"{JOB}-ca")["data"]
    for what, (plural, name, change) in EDITS.items():
        before = lab.must(plural, name)
        lab.patch(plural, name, change)
        lab.wait(lambda: _is_restored(lab, plural, before, change), f"{what} to be put right", operator)  # noqa: B023
    for plural, name in (("statefulsets", f"{JOB}-trainer"), ("services", f"{JOB}-free"), ("secrets", f"{JOB}-ca")):
        lab.delete(plural, name)
    settle(lab, operator)
    assert lab.must("secrets", f"{JOB}-ca")["data"] != authority  # it was deleted; it is not made new for less
    assert replicas(lab, of="generatorpools")["fixed"] == 2


def _is_restored(lab: Lab, plural: str, before: dict[str, Any], change: dict[str, Any]) -> bool:
    now = lab.must(plural, before["metadata"]["name"])
    if "data" in change:
        return now["data"]["tls.crt"] not in ("bm9uZQ==", before["data"]["tls.crt"])
    if "spec" in change:
        return bool(now["spec"] == before["spec"])
    return all(now["metadata"].get(key) == before["metadata"].get(key) for key in ("labels", "ownerReferences"))


def test_a_job_without_generators_has_its_trainer_alone(lab: Lab, operator: Operator) -> None:
    document = job(algorithm={"supervised": {}}, generators=[], trainer={})
    document["spec"]["pipeline"] = {"mode": "StreamSync", "batchGroups": 4, "steps": 20}
    document["spec"]["task"] |= {"groupSize": 1}
    del document["spec"]["task"]["rewards"]
    lab.create("rljobs", document)
    alone = {plural: {name for name in made if name not in POOLS} for plural, made in MADE.items()}
    lab.wait(lambda: lab.made(JOB) == alone and replicas(lab) == {"trainer": 1}, f"the objects of {JOB}", operator)
    lab.wait_until_quiet(JOB, operator)
    assert lab.condition(JOB, "Ready")["reason"] != "NoGenerators"
    lab.patch("rljobs", JOB, {"spec": {"suspend": True}})
    lab.wait(lambda: replicas(lab) == {"trainer": 0}, "no pods", operator)
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.made(JOB) == KEPT, "nothing but what is kept", operator)


def test_suspend_and_resume(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    claims = {each["metadata"]["uid"] for each in lab.list("persistentvolumeclaims")}
    lab.patch("rljobs", JOB, {"spec": {"suspend": True}})
    lab.wait(lambda: lab.condition(JOB, "Suspended").get("status") == "True", "Suspended", operator)
    assert replicas(lab) == STOPPED
    assert lab.list("pods") == []
    assert replicas(lab, of="generatorpools") == {"fixed": 2, "auto": 1, "free": 3}  # what is asked for stays
    lab.patch("rljobs", JOB, {"spec": {"suspend": False}})
    settle(lab, operator)
    assert lab.condition(JOB, "Suspended")["status"] == "False"
    assert {each["metadata"]["uid"] for each in lab.list("persistentvolumeclaims")} == claims


def test_scaling_by_edit_and_from_outside(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    document = job()
    document["spec"]["generators"][0]["scaling"] = {"static": {"replicas": 5}}
    lab.patch("rljobs", JOB, document)
    lab.wait(lambda: replicas(lab) == RUNNING | {"fixed": 5}, "five of the fixed pool", operator)
    assert replicas(lab, of="generatorpools")["fixed"] == 5
    lab.patch("generatorpools", f"{JOB}-free", {"spec": {"replicas": 6}}, part="scale")
    lab.wait(lambda: replicas(lab)["free"] == 6, "six of the free pool", operator)
    operator.wait_for_looks(2)
    assert replicas(lab, of="generatorpools")["free"] == 6  # nobody takes it back
    pool = lab.must("generatorpools", f"{JOB}-free")["status"]
    assert [entry["toReplicas"] for entry in pool["scalingHistory"]] == [3, 6]


def test_a_pool_that_changes_hands_keeps_its_size(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    document = job()
    document["spec"]["generators"][0]["scaling"] = {"external": {"initialReplicas": 1}}
    lab.patch("rljobs", JOB, document)
    lab.wait(
        lambda: lab.must("generatorpools", f"{JOB}-fixed")["spec"]["scaling"] == "external",
        "the pool to be external",
        operator,
    )
    operator.wait_for_looks(2)
    assert (replicas(lab)["fixed"], replicas(lab, of="generatorpools")["fixed"]) == (2, 2)
    lab.patch("generatorpools", f"{JOB}-fixed", {"spec": {"replicas": 4}}, part="scale")
    lab.wait(lambda: replicas(lab)["fixed"] == 4, "four by /scale", operator)
    document["spec"]["generators"][0]["scaling"] = {"static": {"replicas": 2}}
    lab.patch("rljobs", JOB, document)
    lab.wait(lambda: replicas(lab)["fixed"] == 2, "two again", operator)
    settle(lab, operator)


def test_another_controllers_job_is_left_alone(lab: Lab, operator: Operator, own_control_plane: ControlPlane) -> None:
    looks = operator.looks
    lab.create("rljobs", job(managedBy="kueue.x-k8s.io/multikueue"))
    operator.wait_for_looks(1, since=looks)
    other = copy.deepcopy(job())
    other["metadata"]["name"] = "ours"
    lab.create("rljobs", other)
    lab.wait(lambda: bool(lab.condition("ours", "Ready")), "our own job", operator)
    assert lab.made(JOB) == NOTHING
    assert "finalizers" not in lab.must("rljobs", JOB)["metadata"]
    lab.delete("rljobs", JOB)
    assert lab.get("rljobs", JOB) is None


def test_an_object_of_somebody_else_is_left_alone(lab: Lab, operator: Operator) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{JOB}-job"}, "data": {"a": "b"}}
    lab.create("configmaps", theirs)
    lab.create("rljobs", job())
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "NameTaken", "the condition NameTaken", operator)
    assert "ConfigMap sums-job: must not exist before" in lab.condition(JOB, "Ready")["message"]
    assert lab.must("configmaps", f"{JOB}-job")["data"] == {"a": "b"}
    assert "ownerReferences" not in lab.must("configmaps", f"{JOB}-job")["metadata"]
    assert lab.list("statefulsets") == []  # no pod without all that it needs
    lab.delete("configmaps", f"{JOB}-job")
    lab.patch("rljobs", JOB, {"spec": {"activeDeadlineSeconds": 3600}})  # any new wish ends the pause
    settle(lab, operator)


def test_an_account_that_exists_is_not_taken_over(lab: Lab, operator: Operator) -> None:
    lab.create("serviceaccounts", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "robot"}})
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/r"}
    lab.create("rljobs", job(serviceAccount={"name": "robot", "annotations": role}))
    lab.wait(lambda: lab.condition(JOB, "Ready").get("reason") == "NameTaken", "the condition NameTaken", operator)
    assert "ServiceAccount robot: must not exist before" in lab.condition(JOB, "Ready")["message"]
    assert not {"annotations", "ownerReferences"} & set(lab.must("serviceaccounts", "robot")["metadata"])
    assert lab.list("statefulsets") == []
    lab.delete("serviceaccounts", "robot")
    lab.patch("rljobs", JOB, {"spec": {"activeDeadlineSeconds": 3600}})  # any new wish ends the pause
    lab.wait(lambda: bool(lab.list("statefulsets")), "the pods' StatefulSets", operator)
    made = lab.must("serviceaccounts", "robot")["metadata"]
    assert made["annotations"].items() >= role.items()
    assert made["ownerReferences"][0]["name"] == JOB


def test_deletion_leaves_the_claims_that_are_kept(lab: Lab, operator: Operator) -> None:
    start(lab, operator)
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)
    # Not later: all of it went before the job did.
    assert lab.made(JOB) == KEPT
    assert lab.list("pods") == []
    again = start(lab, operator)  # a new job of the same name takes the claim that was kept
    assert again["metadata"]["generation"] == 1


def test_deletion_while_suspended_and_before_anything_is_made(lab: Lab, operator: Operator) -> None:
    lab.create("rljobs", job(suspend=True))
    lab.delete("rljobs", JOB)
    lab.wait(lambda: lab.get("rljobs", JOB) is None, "the job to be gone", operator)
    lab.wait(lambda: lab.made(JOB) in (NOTHING, KEPT), "its objects to be gone", operator)
    operator.wait_for_looks(0)


def test_killed_in_the_middle_it_goes_on(lab: Lab, operator: Operator, own_control_plane: ControlPlane) -> None:
    lab.create("rljobs", job())
    lab.wait(lambda: lab.get("services", f"{JOB}-scheduler") is not None, "half of the objects", operator)
    operator.stop(kill=True)
    authority = (lab.get("secrets", f"{JOB}-ca") or {}).get("data")
    operator.start().wait_until_leading()
    settle(lab, operator)
    assert replicas(lab, of="generatorpools") == {"fixed": 2, "auto": 1, "free": 3}
    if authority is not None:
        assert lab.must("secrets", f"{JOB}-ca")["data"] == authority


def test_one_of_two_leads_and_the_other_takes_over(
    lab: Lab, operator: Operator, own_control_plane: ControlPlane
) -> None:
    second = Operator(own_control_plane, lab.namespace, name="second").start()
    lab.wait(lambda: second.page("readyz")[0] == 200, "the second operator", second)
    start(lab, operator)
    assert (operator.leads, second.leads) == (True, False)
    assert operator.stop() == 0  # it gives the Lease back: the other need not wait for its time
    second.wait_until_leading()
    lab.patch("rljobs", JOB, {"spec": {"suspend": True}})
    lab.wait(lambda: replicas(lab) == STOPPED, "the second operator to act", second)
    operator.start()
    lab.wait(lambda: operator.page("readyz")[0] == 200, "the first operator", operator)
    second.stop(kill=True)
    operator.wait_until_leading()
    lab.patch("rljobs", JOB, {"spec": {"suspend": False}})
    settle(lab, operator)


def test_a_stolen_lease_ends_the_process(lab: Lab, operator: Operator) -> None:
    lab.patch("leases", "streamrl-operator", {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 60}})
    assert operator.ended() == 75
    assert lab.must("leases", "streamrl-operator")["spec"]["holderIdentity"] == "thief"


def test_without_rights_to_the_lease_nobody_is_ready(own_control_plane: ControlPlane, namespace: str, lab: Lab) -> None:
    operator = Operator(own_control_plane, namespace, user="nobody-in-particular").start()
    refused = "nobody leads: get /apis/coordination.k8s.io/v1/namespaces/"
    lab.wait(lambda: operator.page("readyz")[1].startswith(refused), "it to say what it lacks", operator)
    status, text = operator.page("readyz")
    assert status == 503
    assert text.endswith("; grant the rules of the chart's rbac/operator.yaml\n")
    assert operator.page("healthz")[0] == 200
    assert operator.stop() == 0


def test_an_api_server_that_is_away(lab: Lab, operator: Operator, own_control_plane: ControlPlane) -> None:
    start(lab, operator)
    before = lab.versions(JOB)
    with own_control_plane.without_apiserver():
        assert operator.ended() == 75  # it cannot renew the Lease, and another could have it by now
        operator.start()  # as a kubelet does
        lab.wait(lambda: operator.page("healthz")[0] == 200, "the operator to wait for the API server", operator)
    operator.wait_until_leading()
    operator.wait_for_looks()
    assert lab.versions(JOB) == before


def test_a_change_of_certificate_authority(own_control_plane: ControlPlane, namespace: str, lab: Lab) -> None:
    short = {"STREAMRL_CA_LIFE_SECONDS": "45", "STREAMRL_LEAF_LIFE_SECONDS": "30", "STREAMRL_CA_SETTLE_SECONDS": "1"}
    operator = Operator(own_control_plane, namespace, **short).start().wait_until_leading()
    lab.create("rljobs", job())
    lab.wait(lambda: lab.get("statefulsets", f"{JOB}-trainer") is not None, "the trainer", operator)
    first = lab.must("secrets", f"{JOB}-ca")["data"]["ca.crt"]
    lab.wait(
        lambda: lab.must("secrets", f"{JOB}-ca")["data"]["ca.crt"] != first, "another CA", operator, deadline_s=120
    )

    def only_the_present_one_is_trusted() -> bool:
        """Asked as a whole: a change may have begun again meanwhile."""
        authority = lab.must("secrets", f"{JOB}-ca")["data"]
        roles = ("scheduler", "generator")
        trusted = {lab.must("secrets", f"{JOB}-tls-{role}")["data"]["ca.crt"] for role in roles}
        return set(authority) == {"ca.crt", "ca.key"} and trusted == {authority["ca.crt"]}

    lab.wait(only_the_present_one_is_trusted, "trust in the new CA alone", operator)
    assert operator.stop() == 0


def test_a_configuration_that_cannot_be_used(own_control_plane: ControlPlane, namespace: str) -> None:
    wrong = Operator(own_control_plane, namespace, STREAMRL_RESYNC_SECONDS="soon").start()
    assert wrong.ended() == 2
    assert "STREAMRL_RESYNC_SECONDS: must be a number, at least 0.1, got 'soon'; unset it for 30" in wrong.tail()
