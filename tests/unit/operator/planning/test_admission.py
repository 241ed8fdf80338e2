"""Jobs in queues: what is asked of Kueue, what follows from its answers, and what it is told."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from streamrl import names
from support.job_lives import conditions, edited, message, reasons
from support.observed_jobs import JOB, generator, observed, page, pool_object, trainer
from support.queued_jobs import FLAVOR, FLAVORS, GANG, QUEUE, QueuedJob, more, queued_document


def of_document(**changes: Any) -> QueuedJob:
    return QueuedJob(look=replace(observed(queued_document(**changes)), kueue=True))


def admitted(job: QueuedJob | None = None) -> QueuedJob:
    job = job or QueuedJob()
    job.settle()
    job.admit()
    job.settle()
    return job


def kueue_sees(job: QueuedJob, name: str = GANG) -> dict[str, tuple[str, str]]:
    status = job.look.workloads[name].get("status", {})
    return {one["type"]: (one["status"], one["reason"]) for one in status.get("conditions", ())}


def test_a_job_in_a_queue_asks_for_its_gang_and_has_no_pods() -> None:
    job = QueuedJob()
    decision = job.settle()
    assert not decision.wanted.any_pods
    assert conditions(decision)["Ready"] == ("False", "Queued")
    assert conditions(decision)["Suspended"] == ("True", "Queued")
    spec = job.look.workloads[GANG]["spec"]
    assert spec["queueName"] == QUEUE
    assert [(one["name"], one["count"]) for one in spec["podSets"]] == [("trainer", 1), ("sim", 2)]
    template = job.planned(decision)["StatefulSet", f"{JOB}-trainer"]["spec"]["template"]
    assert spec["podSets"][0]["template"] == template  # what is counted is what will run


def test_what_it_waits_for_is_said_in_kueues_words() -> None:
    job = QueuedJob()
    job.settle()
    job.say(GANG, QuotaReserved=False)
    assert message(job.settle(), "Ready") == "waits in queue team: QuotaReserved False"


def test_an_admitted_job_runs_where_its_flavour_says() -> None:
    job = admitted()
    decision = job.decide()
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 2})
    assert conditions(decision)["Suspended"] == ("False", "NotSuspended")
    for name in (f"{JOB}-trainer", f"{JOB}-sim"):
        spec = job.planned(decision)["StatefulSet", name]["spec"]["template"]["spec"]
        assert (spec["nodeSelector"], spec["tolerations"]) == (FLAVORS["nodeLabels"], FLAVORS["tolerations"])


@pytest.mark.parametrize("edited_to", [None, {"nodeLabels": {"gpu": "b200"}}], ids=["deleted", "edited"])
def test_a_flavour_that_changed_touches_no_job_that_it_was_admitted_with(edited_to: dict[str, Any] | None) -> None:
    """Also where the operator began anew, or the pods are made again."""
    job = admitted()
    was = job.planned(job.decide())
    job.known = {} if edited_to is None else {("ResourceFlavor", FLAVOR): {"spec": edited_to}}
    job.look = replace(job.look, looked_up={})
    decision = job.settle()
    assert (decision.wanted.trainers, decision.wanted.generators) == (1, {"sim": 2})
    planned = job.planned(decision)
    for key in (("StatefulSet", f"{JOB}-trainer"), ("StatefulSet", f"{JOB}-sim")):
        assert planned[key]["spec"]["template"] == was[key]["spec"]["template"]
    job.look = replace(job.look, pods=[])  # they are made again
    assert job.settle().wanted.any_pods
    with_pod(job, nodeSelector={"zone": "z"})  # the owner's own change counts as ever
    spec = job.planned(job.settle())["StatefulSet", f"{JOB}-sim"]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"zone": "z", "gpu": "h100"}


def test_an_admission_takes_flavours_as_they_are_then() -> None:
    job = admitted()
    job.say(GANG, Evicted="Preempted")
    job.settle()
    job.known = {("ResourceFlavor", FLAVOR): {"spec": {"nodeLabels": {"gpu": "b200"}}}}
    job.admit()
    template = job.planned(job.settle())["StatefulSet", f"{JOB}-sim"]["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"gpu": "b200"}


def test_a_job_waits_for_a_flavour_that_is_not_there() -> None:
    job = QueuedJob(known={})
    job.settle()
    job.admit()
    assert message(job.settle(), "Ready") == f"queue team: ResourceFlavor {FLAVOR} is not there"


def test_a_check_may_add_to_the_pods_of_a_role() -> None:
    job = QueuedJob()
    job.settle()
    job.admit()
    update = {"name": "sim", "annotations": {"a": "1"}, "labels": {"b": "2"}, "nodeSelector": {"zone": "z"}}
    found = job.look.workloads[GANG]
    status = {**found["status"], "admissionChecks": [{"name": "c", "state": "Ready", "podSetUpdates": [update]}]}
    job.look = replace(job.look, workloads={GANG: {**found, "status": status}})
    planned = job.planned(job.decide())
    template = planned["StatefulSet", f"{JOB}-sim"]["spec"]["template"]
    assert template["spec"]["nodeSelector"] == {"gpu": "h100", "zone": "z"}
    assert (template["metadata"]["annotations"]["a"], template["metadata"]["labels"]["b"]) == ("1", "2")
    assert "zone" not in planned["StatefulSet", f"{JOB}-trainer"]["spec"]["template"]["spec"]["nodeSelector"]


def test_an_evicted_job_gives_the_quota_back_when_its_last_pod_is_gone() -> None:
    job = admitted()
    job.say(GANG, Evicted="Preempted")
    decision = job.decide()
    assert not decision.wanted.any_pods
    assert conditions(decision)["Ready"] == ("False", "Suspending")
    assert kueue_sees(job)["QuotaReserved"] == ("True", "QuotaReserved")  # the pods still end
    job.look = replace(job.look, pods=[trainer(leaving=True)])
    assert job.decide().workload_statuses == {}
    decision = job.settle()
    assert conditions(decision)["Suspended"] == ("True", "Evicted")
    assert kueue_sees(job) == {
        "Evicted": ("True", "Preempted"),
        "QuotaReserved": ("False", "Pending"),
        "Admitted": ("False", "NoReservation"),
        "Requeued": ("True", "Preempted"),
        "PodsReady": ("False", "WaitForStart"),
    }
    assert "admission" not in job.look.workloads[GANG]["status"]
    assert decision.status.get("startTime") is None  # the deadline's clock stands
    job.admit()
    assert reasons(job.decide()) == ["Resumed"]


def test_after_a_deactivation_kueue_decides_when_it_is_queued_again() -> None:
    job = admitted()
    job.say(GANG, Evicted="Deactivated")
    job.settle()
    assert kueue_sees(job)["Requeued"] == ("False", "Deactivated")
    assert GANG in job.look.workloads


def test_kueue_is_told_when_the_gang_is_ready_and_when_it_is_not() -> None:
    job = admitted()
    assert kueue_sees(job)["PodsReady"] == ("True", "Started")
    job.look = replace(job.look, pods=[trainer(), generator(0), generator(1, ready=False)])
    job.decide()
    assert kueue_sees(job)["PodsReady"] == ("False", "WaitForRecovery")
    job.settle()
    assert kueue_sees(job)["PodsReady"] == ("True", "Recovered")


def test_a_job_that_has_ended_is_finished_when_its_last_pod_is_gone() -> None:
    job = admitted()
    result = {"status": "succeeded", "steps": 20, "final_reward": 0.5, "checkpoint": "c"}
    job.look = replace(job.look, numbers=page(step=20, ended=True, result=result))
    job.decide()
    assert "Finished" not in kueue_sees(job)
    job.settle()
    assert kueue_sees(job)["Finished"] == ("True", "Succeeded")
    assert job.decide().workload_statuses == {}


def test_a_suspended_job_keeps_its_quota_until_its_pods_are_gone_and_queues_anew() -> None:
    job = admitted()
    job.look = edited(job.look, suspend=True)
    assert GANG in job.decide().wanted.workloads
    assert job.settle().wanted.workloads == {}
    job.look = edited(job.look, suspend=False)
    decision = job.settle()
    assert conditions(decision)["Ready"] == ("False", "Queued")
    assert list(decision.wanted.workloads) == [GANG]


def test_pools_that_changed_while_the_last_pods_ended_queue_anew() -> None:
    """Resumed before the last pod was gone: the gang still holds the quota of the pools before."""
    job = admitted()
    pools = [{**job.look.raw["spec"]["generators"][0], "name": "other"}]
    job.look = replace(edited(job.look, generators=pools), pods=[], sets={})
    decision = job.decide()
    assert conditions(decision)["Ready"] == ("False", "Queued")
    assert message(decision, "Ready") == f"queues anew in {QUEUE}: its pools or their resources have changed"
    assert decision.wanted.workloads == {}
    job.settle()
    assert [one["name"] for one in job.look.workloads[GANG]["spec"]["podSets"]] == ["trainer", "other"]


def with_pod(job: QueuedJob, **pod: Any) -> None:
    """The owner edits `generators[0].pod`."""
    pools = [{**job.look.raw["spec"]["generators"][0], "pod": pod}]
    job.look = edited(job.look, generators=pools)


@pytest.mark.parametrize("part", ["requests", "limits"])
def test_pods_that_are_to_have_more_than_was_admitted_queue_anew(part: str) -> None:
    job = admitted()
    with_pod(job, resources={part: {"nvidia.com/gpu": "8"}})
    decision = job.decide()
    assert not decision.wanted.any_pods
    assert conditions(decision)["Ready"] == ("False", "Suspending")
    assert GANG in decision.wanted.workloads  # the pods of before still have its quota
    decision = job.settle()
    assert message(decision, "Ready") == "waits in queue team: Kueue has not looked at it yet"
    assert not decision.wanted.any_pods
    pool_set = job.look.workloads[GANG]["spec"]["podSets"][1]
    assert pool_set["template"]["spec"]["containers"][0]["resources"] == {part: {"nvidia.com/gpu": "8"}}
    assert job.look.workloads[GANG]["status"] == {}
    job.admit()
    assert job.settle().wanted.generators == {"sim": 2}


def test_a_replica_beyond_the_gang_goes_with_it_when_its_pods_are_to_have_more() -> None:
    job = scaled(3)
    job.admit(more(0))
    job.settle()
    with_pod(job, resources={"limits": {"nvidia.com/gpu": "8"}})
    job.settle()
    assert list(job.look.workloads) == [GANG]
    assert job.look.pods == []


def test_an_evicted_job_keeps_its_workload_whatever_its_pods_are_to_have() -> None:
    """It holds what Kueue knows of it: its place, its pauses, and that somebody deactivated it."""
    job = admitted()
    job.say(GANG, Evicted="Deactivated")
    with_pod(job, resources={"limits": {"nvidia.com/gpu": "8"}})
    job.settle()
    assert kueue_sees(job)["Requeued"] == ("False", "Deactivated")
    pool_set = job.look.workloads[GANG]["spec"]["podSets"][1]
    assert pool_set["template"]["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_a_limit_that_is_taken_away_queues_anew() -> None:
    document = queued_document()
    document["spec"]["generators"][0]["pod"] = {"resources": {"limits": {"nvidia.com/gpu": "8"}}}
    job = admitted(QueuedJob(look=replace(observed(document), kueue=True)))
    with_pod(job)
    assert not job.decide().wanted.any_pods


@pytest.mark.parametrize(
    "pod",
    [
        {"image": "other"},
        {"env": [{"name": "A", "value": "1"}]},
        {"nodeSelector": {"zone": "z"}},
        {"resources": {"requests": {"cpu": "1000m"}}},
    ],
    ids=str,
)
def test_what_costs_no_quota_changes_in_place(pod: dict[str, Any]) -> None:
    document = queued_document()
    document["spec"]["generators"][0]["pod"] = {"resources": {"requests": {"cpu": "1"}}}
    job = admitted(QueuedJob(look=replace(observed(document), kueue=True)))
    with_pod(job, **{"resources": {"requests": {"cpu": "1"}}, **pod})
    assert job.settle().wanted.generators == {"sim": 2}


def test_what_kueue_writes_out_is_no_change() -> None:
    """Its webhook stores a container without resources with empty ones."""
    document = queued_document()
    document["spec"]["generators"][0]["pod"] = {"containers": [{"name": "helper", "image": "helper:1"}]}
    job = admitted(QueuedJob(look=replace(observed(document), kueue=True)))
    workload = copy.deepcopy(job.look.workloads[GANG])
    helpers = [one for each in workload["spec"]["podSets"] for one in each["template"]["spec"]["containers"]]
    assert [one.setdefault("resources", {}) for one in helpers if one["name"] == "helper"] == [{}]
    job.look = replace(job.look, workloads={GANG: workload})
    assert job.settle().wanted.generators == {"sim": 2}


def test_a_pool_that_is_asked_for_no_generators_is_ready_without() -> None:
    job = admitted(of_document(scaling={"external": {}}))
    job.look = replace(job.look, pools={"sim": pool_object(0, scaling="external")}, pods=[trainer()])
    assert job.decide().wanted.generators == {"sim": 0}
    assert kueue_sees(job)["PodsReady"] == ("True", "Started")


def test_without_kueue_a_job_with_a_queue_has_no_pods_and_says_so() -> None:
    job = QueuedJob(look=observed(queued_document()))
    decision = job.decide()
    assert not decision.wanted.any_pods
    assert conditions(decision)["Ready"] == ("False", "KueueMissing")
    assert decision.wanted.workloads == {}
    assert decision.requeue_after_s is not None


def test_a_job_without_a_queue_has_no_workload() -> None:
    job = QueuedJob(look=replace(observed(), kueue=True))
    assert job.settle().wanted.workloads == {}
    assert len(job.look.pods) == 3


def test_the_priority_is_that_of_its_class_or_it_waits_for_the_class() -> None:
    labels = {names.LABEL_QUEUE: QUEUE, names.LABEL_QUEUE_PRIORITY: "high"}
    job = of_document(labels=labels)
    job.settle()
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}
    assert job.look.workloads[GANG]["spec"]["priorityClassRef"] == reference
    assert job.look.workloads[GANG]["spec"]["priority"] == 1000
    lacking = of_document(labels=labels | {names.LABEL_QUEUE_PRIORITY: "none"})
    decision = lacking.settle()
    assert message(decision, "Ready") == "queue team: WorkloadPriorityClass none is not there"
    assert decision.wanted.workloads == {}


def test_a_pod_priority_counts_where_there_is_no_label() -> None:
    job = of_document(trainer={"engine": {"simulated": {}}, "pod": {"priorityClassName": "p"}})
    job.known = {("PriorityClass", "p"): {"value": 7}}
    job.settle()
    spec = job.look.workloads[GANG]["spec"]
    assert (spec["priorityClassRef"]["group"], spec["priority"]) == ("scheduling.k8s.io", 7)


def test_another_label_moves_a_job_that_waits_and_not_one_that_holds_quota() -> None:
    job = QueuedJob()
    job.settle()
    job.look.raw["metadata"]["labels"][names.LABEL_QUEUE] = "other"
    job.settle()
    assert job.look.workloads[GANG]["spec"]["queueName"] == "other"
    job.admit()
    job.settle()
    del job.look.raw["metadata"]["labels"][names.LABEL_QUEUE]
    decision = job.settle()
    assert job.look.workloads[GANG]["spec"]["queueName"] == "other"
    assert decision.wanted.any_pods


# ---- generators beyond the gang


def scaled(replicas: int) -> QueuedJob:
    """An external pool of so many, whose gang runs."""
    job = of_document(scaling={"external": {"initialReplicas": replicas}})
    return admitted(job)


def test_each_generator_beyond_the_gang_is_admitted_by_itself() -> None:
    job = scaled(3)
    assert list(job.look.workloads) == [GANG, more(0), more(1)]
    assert len(job.look.pods) == 2  # the trainer, and one
    pod_set = job.look.workloads[more(0)]["spec"]["podSets"][0]
    assert (pod_set["name"], pod_set["count"]) == ("sim", 1)
    assert pod_set["template"]["spec"]["nodeSelector"] == FLAVORS["nodeLabels"]  # the flavour that the pool has
    decision = job.decide()
    assert decision.pool_statuses["sim"]["reason"] == "the queue admits 1 of 3 generators"
    job.admit(more(1))
    decision = job.settle()
    assert decision.wanted.generators == {"sim": 2}
    assert kueue_sees(job, more(1))["PodsReady"] == ("True", "Started")


def test_a_smaller_pool_gives_back_first_what_waits_and_the_rest_after_its_pods() -> None:
    job = scaled(4)
    job.admit(more(1))
    job.settle()
    job.look = replace(job.look, pools={"sim": pool_object(2, scaling="external")})
    job.settle()
    assert list(job.look.workloads) == [GANG, more(1)]
    job.look = replace(job.look, pools={"sim": pool_object(1, scaling="external")})
    decision = job.decide()
    assert decision.wanted.generators == {"sim": 1}
    assert more(1) in decision.wanted.workloads  # its pod is still there
    assert list(job.settle().wanted.workloads) == [GANG]


def test_an_evicted_replica_goes_alone_and_waits_again() -> None:
    job = scaled(3)
    job.admit(more(0))
    job.admit(more(1))
    job.settle()
    job.say(more(0), Evicted="Preempted")
    decision = job.decide()
    assert decision.wanted.generators == {"sim": 2}
    assert kueue_sees(job, more(0))["QuotaReserved"][0] == "True"
    decision = job.settle()
    assert kueue_sees(job, more(0))["QuotaReserved"] == ("False", "Pending")
    assert decision.wanted.trainers == 1
    assert set(decision.wanted.workloads) == {GANG, more(0), more(1)}


def test_an_evicted_gang_takes_all_along() -> None:
    job = scaled(3)
    job.admit(more(0))
    job.settle()
    job.say(GANG, Evicted="Preempted")
    job.settle()
    assert list(job.look.workloads) == [GANG]
    assert job.look.pods == []


@pytest.mark.parametrize("size", [2, 5])
def test_a_static_pool_that_is_resized_keeps_the_gang_that_was_admitted(size: int) -> None:
    job = of_document(scaling={"static": {"replicas": 3}})
    admitted(job)
    generators = [dict(job.look.raw["spec"]["generators"][0], scaling={"static": {"replicas": size}})]
    job.look = edited(job.look, generators=generators)
    decision = job.settle()
    assert job.look.workloads[GANG]["spec"]["podSets"][1]["count"] == 3
    assert decision.wanted.generators == {"sim": min(size, 3)}
    assert len(job.look.workloads) == 1 + max(0, size - 3)


# ---- auto


def generators_of(count: int, *, busy_s: float, wall_s: float) -> list[dict[str, Any]]:
    parts = {"busy": busy_s, "pipeline_no_samples": wall_s - busy_s}
    line = {"pool": "sim", "slots": 8, "active": 8, "tokens": 10 * wall_s, "wall_s": wall_s, "bubbles": parts}
    return [{"id": f"generator-sim-{number}", **line} for number in range(count)]


def slow_generation(count: int, *, step: int, at_s: float) -> dict[str, Any]:
    """The trainer is idle for nine tenths of the time, the generators never."""
    idle = {"busy": 0.1 * at_s, "pipeline_no_samples": 0.9 * at_s}
    trainer = {"wall_s": at_s, "bubbles": idle}
    return page(step=step, queue=100, generators=generators_of(count, busy_s=at_s, wall_s=at_s), trainer=trainer)


def automatic() -> QueuedJob:
    auto = {"auto": {"initialReplicas": 1, "minReplicas": 1, "maxReplicas": 4, "cooldownSeconds": 0}}
    return admitted(of_document(scaling=auto))


def pass_steps(job: QueuedJob, looks: int) -> None:
    """Each look sees another step, with the generators that are there."""
    for _ in range(looks):
        at_s = job.look.at_s + 10
        count = len(job.look.pods) - 1
        numbers = slow_generation(count, step=int(at_s // 10), at_s=at_s)
        job.look = replace(job.look, numbers=numbers, at_s=at_s)
        job.settle(1)


def test_auto_asks_the_queue_for_one_more_and_goes_on_measuring_with_what_there_is() -> None:
    job = automatic()
    pass_steps(job, 8)
    assert list(job.look.workloads) == [GANG, more(0)]  # and not one for each look
    assert job.look.pools["sim"]["spec"]["replicas"] == 2
    assert job.look.scaling["sim"].wanted == 1
    assert job.look.scaling["sim"].pace is not None
    assert len(job.look.pods) == 2
    job.admit(more(0))
    pass_steps(job, 2)
    assert (job.look.scaling["sim"].wanted, len(job.look.pods)) == (2, 3)
    pass_steps(job, 8)
    assert list(job.look.workloads) == [GANG, more(0), more(1)]


def test_auto_measures_anew_after_its_queue_took_a_generator() -> None:
    job = automatic()
    pass_steps(job, 8)
    job.admit(more(0))
    pass_steps(job, 2)
    job.say(more(0), Evicted="Preempted")
    pass_steps(job, 2)
    assert (job.look.scaling["sim"].wanted, len(job.look.pods)) == (1, 2)
    assert list(job.look.workloads) == [GANG, more(0)]  # still asked for
