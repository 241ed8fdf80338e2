"""Jobs in queues, judged by Kueue's own controllers and webhooks. No pod runs here; whether it is there is what is asked."""

import base64
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster import rights
from cluster.harness import kueue
from cluster.harness.control_plane import MASTERS, ControlPlane
from cluster.harness.processes import Server
from cluster.operators import Lab, Operator, refused
from streamrl import keys, names
from streamrl.status import UNSEEN_GENERATION
from support.jobs import simulated_job

pytestmark = pytest.mark.timeout(600)

USER = "streamrl-operator-with-kueue"
GPU = "nvidia.com/gpu"
MEMORY_AND_CPU = {"cpu": "64", "memory": "256Gi"}
QUEUE, HIGH = "team", "high"
HOST = "kubernetes.io/hostname"
NODES = ("gpu-1", "gpu-2", "gpu-3")
PREEMPTS = {"preemption": {"withinClusterQueue": "LowerPriority"}}


def job(name: str, *, queue: str = QUEUE, priority: str = "", replicas: int = 1, **spec: Any) -> dict[str, Any]:
    """A job of a trainer and so many generators, with a GPU each."""
    document = simulated_job(replicas=replicas)
    labels = {names.LABEL_QUEUE: queue} | ({names.LABEL_QUEUE_PRIORITY: priority} if priority else {})
    document["metadata"] = {"name": name, "labels": labels}
    pod = {"resources": {"limits": {GPU: 1}}}
    document["spec"]["trainer"]["pod"] = pod
    document["spec"]["generators"][0]["pod"] = pod
    document["spec"] |= spec
    return document


class QueueLab(Lab):
    """A namespace with queues."""

    cluster: ControlPlane

    def quota(self, gpus: int, *, flavor: dict[str, Any] | None = None, **spec: Any) -> None:
        """A queue with so many GPUs."""
        name = f"{self.namespace}-flavor"
        kueue.flavor(self.cluster, name, **(flavor or {}))
        quota = {GPU: str(gpus), **MEMORY_AND_CPU}
        kueue.queue(self.cluster, self.namespace, QUEUE, flavor=name, quota=quota, **spec)

    def set_quota(self, gpus: int) -> None:
        """Of the queue."""
        path = f"{kueue.GROUP}/clusterqueues/{self.namespace}-{QUEUE}"
        groups = self.cluster.api.get(path).expect()["spec"]["resourceGroups"]
        groups[0]["flavors"][0]["resources"][0]["nominalQuota"] = str(gpus)
        self.cluster.api.patch(path, {"spec": {"resourceGroups": groups}}).expect()

    def pods(self, name: str) -> list[str]:
        """Of a job."""
        labels = {each["metadata"]["name"]: each["metadata"]["labels"] for each in self.list("pods")}
        return sorted(pod for pod, found in labels.items() if found[names.LABEL_JOB] == name)

    def reason(self, name: str) -> str:
        """Of the condition Ready."""
        return str(self.condition(name, "Ready").get("reason"))

    def workloads(self) -> dict[str, dict[str, str]]:
        """Workload -> its conditions."""
        found = self.cluster.api.get(f"{kueue.GROUP}/namespaces/{self.namespace}/workloads").expect()["items"]
        return {
            each["metadata"]["name"]: {
                one["type"]: one["status"] for one in each.get("status", {}).get("conditions", ())
            }
            for each in found
        }

    def wait_pods(self, name: str, count: int, operator: Operator) -> None:
        """Until a job has so many."""
        self.wait(lambda: len(self.pods(name)) == count, f"{count} pods of {name}", operator)

    def wait_reason(self, name: str, reason: str, operator: Operator) -> None:
        """Until a job says so."""
        self.wait(lambda: self.reason(name) == reason, f"{name} to say {reason}", operator)


def _operator(plane: ControlPlane, namespace: str, **environ: str) -> Operator:
    rights.grant(plane.api, USER, home=namespace, kueue__enabled="true")
    return Operator(plane, namespace, user=USER, **environ).start()


@pytest.fixture
def lab(own_control_plane: ControlPlane, namespace: str) -> QueueLab:
    return QueueLab(own_control_plane, namespace)


def test_a_job_with_a_queue_does_not_run_where_there_is_no_kueue(
    lab: QueueLab, own_control_plane: ControlPlane
) -> None:
    # First in this file: Kueue's definitions stay once they are installed.
    for environ in ({}, {keys.ENV_KUEUE: "true"}):
        operator = _operator(own_control_plane, lab.namespace, **environ).wait_until_leading()
        name = f"job-{len(environ)}"
        lab.create("rljobs", job(name))
        lab.create("rljobs", job(f"free-{len(environ)}", queue=""))
        lab.wait_reason(name, "KueueMissing", operator)
        lab.wait_pods(f"free-{len(environ)}", 2, operator)
        assert lab.pods(name) == []
        assert "kueue.enabled" in lab.condition(name, "Suspended")["message"]
        assert operator.stop() == 0


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    """Of Kueue: none, or one that runs."""
    started: list[Server] = []
    yield started
    for each in started:
        each.stop()


@pytest.fixture
def queued(servers: list[Server], own_control_plane: ControlPlane, namespace: str) -> Iterator[Operator]:
    """An operator with the chart's `kueue.enabled`, beside Kueue."""
    if not servers:
        kueue.install(own_control_plane)
        kinds = [{"name": "RLJob.v1alpha1.streamrl.io"}]
        servers.append(kueue.start(own_control_plane, multiKueue={"externalFrameworks": kinds}))
        kueue.priority(own_control_plane, HIGH, 1000)
    made = _operator(own_control_plane, namespace, **{keys.ENV_KUEUE: "true"})
    yield made.wait_until_leading()
    assert made.stop() == 0, made.tail()
    assert refused(own_control_plane, namespace, user=USER) == set()


def test_two_jobs_and_quota_for_one(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2, flavor={"nodeLabels": {"gpu": "h100"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]})
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)
    lab.create("rljobs", job("second"))
    lab.wait_reason("second", "Queued", queued)
    lab.wait(lambda: "insufficient" in lab.condition("second", "Ready")["message"], "what it waits for", queued)
    for pod in lab.list("pods"):
        assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
        assert {"key": "gpu", "operator": "Exists"} in pod["spec"]["tolerations"]
    assert lab.pods("second") == []
    lab.patch("rljobs", "first", {"spec": {"activeDeadlineSeconds": 1}})  # it ends
    lab.wait_pods("second", 2, queued)
    assert lab.pods("first") == []
    assert lab.workloads()["rljob-first"]["Finished"] == "True"
    lab.wait(lambda: lab.condition("second", "Suspended")["status"] == "False", "the second to say so", queued)


def test_preemption_is_a_suspension_and_the_job_comes_back(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2, **PREEMPTS)
    lab.create("rljobs", job("low"))
    lab.wait_pods("low", 2, queued)
    claims = {each["metadata"]["uid"] for each in lab.list("persistentvolumeclaims")}
    lab.create("rljobs", job("high", priority=HIGH))
    lab.wait_pods("high", 2, queued)
    assert lab.pods("low") == []
    suspended = lab.condition("low", "Suspended")
    assert (suspended["status"], suspended["reason"]) == ("True", "Evicted")
    assert "Preempted" in suspended["message"]
    assert lab.must("rljobs", "low")["spec"].get("suspend", False) is False  # that is its owner's
    assert lab.workloads()["rljob-low"]["Requeued"] == "True"
    lab.delete("rljobs", "high")
    lab.wait_pods("low", 2, queued)
    assert claims <= {each["metadata"]["uid"] for each in lab.list("persistentvolumeclaims")}
    told = [each["reason"] for each in lab.list("events") if each["regarding"].get("name") == "low"]
    assert {"Queued", "Started", "Evicted", "Resumed"} <= set(told)
    assert lab.must("rljobs", "low")["status"]["restarts"] == 0


def test_a_gang_that_does_not_fit_holds_nothing(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2)
    lab.create("rljobs", job("large", replicas=2))  # its trainer alone would fit
    lab.wait(lambda: "insufficient" in lab.condition("large", "Ready").get("message", ""), "the refusal", queued)
    assert lab.pods("large") == []
    lab.create("rljobs", job("small"))
    lab.wait_pods("small", 2, queued)


def test_a_running_job_whose_generators_are_to_have_more_asks_its_queue(lab: QueueLab, queued: Operator) -> None:
    lab.quota(3)
    lab.create("rljobs", job("more"))
    lab.wait_pods("more", 2, queued)
    (pool,) = lab.must("rljobs", "more")["spec"]["generators"]
    lab.patch("rljobs", "more", {"spec": {"generators": [{**pool, "pod": {"resources": {"limits": {GPU: 8}}}}]}})
    lab.wait(lambda: "insufficient" in lab.condition("more", "Ready").get("message", ""), "the refusal", queued)
    assert lab.pods("more") == []
    lab.set_quota(9)
    lab.wait_pods("more", 2, queued)
    limits = {
        each["metadata"]["labels"][names.LABEL_ROLE]: each["spec"]["containers"][0]["resources"]["limits"]
        for each in lab.list("pods")
    }
    assert (limits["trainer"], limits["generator"]) == ({GPU: "1"}, {GPU: "8"})


def test_growth_goes_as_far_as_the_quota(lab: QueueLab, queued: Operator) -> None:
    lab.quota(3, flavor={"nodeLabels": {"gpu": "l40s"}})
    document = job("grows")
    document["spec"]["generators"][0]["scaling"] = {"external": {"initialReplicas": 1}}
    lab.create("rljobs", document)
    lab.wait_pods("grows", 2, queued)
    lab.patch("generatorpools", "grows-sim", {"spec": {"replicas": 4}}, part="scale")
    lab.wait_pods("grows", 3, queued)
    lab.wait(lambda: len(lab.workloads()) == 4, "a Workload for each replica more", queued)
    pool = lab.must("generatorpools", "grows-sim")
    assert pool["status"]["reason"] == "the queue admits 2 of 4 generators"
    assert pool["status"]["desiredReplicas"] == 2
    assert pool["spec"]["replicas"] == 4  # what is asked for stays
    lab.set_quota(5)
    lab.wait_pods("grows", 5, queued)
    assert all(pod["spec"]["nodeSelector"] == {"gpu": "l40s"} for pod in lab.list("pods"))
    lab.patch("generatorpools", "grows-sim", {"spec": {"replicas": 1}}, part="scale")
    lab.wait_pods("grows", 2, queued)
    lab.wait(lambda: list(lab.workloads()) == ["rljob-grows"], "the rest to be given back", queued)


def test_preemption_takes_a_generator_before_the_job(lab: QueueLab, queued: Operator) -> None:
    lab.quota(4, **PREEMPTS)
    document = job("wide")
    document["spec"]["generators"][0]["scaling"] = {"external": {"initialReplicas": 1}}
    lab.create("rljobs", document)
    lab.wait_pods("wide", 2, queued)
    admitted_s = time.time()
    lab.wait(lambda: time.time() > admitted_s + 1, "another second: Kueue takes the latest by whole ones", queued)
    lab.patch("generatorpools", "wide-sim", {"spec": {"replicas": 3}}, part="scale")
    lab.wait_pods("wide", 4, queued)
    lab.create("rljobs", job("high", priority=HIGH))
    lab.wait_pods("high", 2, queued)
    lab.wait_pods("wide", 2, queued)  # the trainer and its last generator
    assert lab.condition("wide", "Suspended")["status"] == "False"
    lab.delete("rljobs", "high")
    lab.wait_pods("wide", 4, queued)


def test_a_suspended_job_gives_its_quota_back(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2)
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)
    lab.create("rljobs", job("second"))
    lab.patch("rljobs", "first", {"spec": {"suspend": True}})
    lab.wait_pods("second", 2, queued)
    assert set(lab.workloads()) == {"rljob-second"}
    lab.patch("rljobs", "first", {"spec": {"suspend": False}})
    lab.wait_reason("first", "Queued", queued)
    lab.delete("rljobs", "second")
    lab.wait_pods("first", 2, queued)


def test_what_kueue_deactivates_waits_for_a_person(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2)
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)
    path = f"{kueue.GROUP}/namespaces/{lab.namespace}/workloads/rljob-first"
    lab.cluster.api.patch(path, {"spec": {"active": False}}).expect()
    lab.wait(lambda: lab.workloads()["rljob-first"].get("QuotaReserved") == "False", "the quota back", queued)
    assert lab.pods("first") == []
    queued.wait_for_looks(1)
    assert lab.cluster.api.get(path).expect()["spec"]["active"] is False  # nobody takes it back
    lab.cluster.api.patch(path, {"spec": {"active": True}}).expect()
    lab.wait_pods("first", 2, queued)


def test_a_deleted_workload_is_made_again_and_waits(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2)
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)
    path = f"{kueue.GROUP}/namespaces/{lab.namespace}/workloads/rljob-first"
    uid = lab.cluster.api.get(path).expect()["metadata"]["uid"]
    lab.cluster.api.delete(path).expect()
    lab.wait(lambda: lab.cluster.api.get(path).body["metadata"].get("uid") not in (None, uid), "another", queued)
    lab.wait_pods("first", 2, queued)


def test_at_rest_nothing_is_written(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2)
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)
    lab.create("rljobs", job("second"))
    lab.wait_reason("second", "Queued", queued)
    lab.wait(lambda: "insufficient" in lab.condition("second", "Ready")["message"], "what it waits for", queued)

    def versions() -> list[object]:
        workloads = lab.cluster.api.get(f"{kueue.GROUP}/namespaces/{lab.namespace}/workloads").expect()["items"]
        return [[each["metadata"]["resourceVersion"] for each in workloads], *map(lab.versions, ("first", "second"))]

    def is_quiet() -> bool:
        before = versions()
        queued.wait_for_looks()
        return before == versions()

    lab.wait(is_quiet, "two looks without a change", queued)


def test_kueue_is_told_when_the_pods_are_ready(lab: QueueLab, queued: Operator) -> None:
    lab.quota(2)
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)

    def say(status: str) -> None:
        condition = {"type": "Ready", "status": status, "lastTransitionTime": None, "lastProbeTime": None}
        for name in lab.pods("first"):
            lab.patch("pods", name, {"status": {"phase": "Running", "conditions": [condition]}}, part="status")

    for status in ("True", "False", "True"):
        say(status)
        lab.wait(lambda: lab.workloads()["rljob-first"].get("PodsReady") == status, f"PodsReady {status}", queued)  # noqa: B023


@pytest.fixture
def nodes(own_control_plane: ControlPlane) -> Iterator[None]:
    """Three, with a GPU each; no pod runs there."""
    api, amounts = own_control_plane.api, {**MEMORY_AND_CPU, GPU: "1", "pods": "9"}
    ready = {"type": "Ready", "status": "True", "reason": "Made", "message": ""}
    for name in NODES:
        api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": {"gpu": "h100", HOST: name}}}).expect()
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        api.patch(f"/api/v1/nodes/{name}/status", {"status": status}).expect()
    yield
    for name in NODES:
        api.delete(f"/api/v1/nodes/{name}").expect()


@pytest.mark.usefixtures("nodes")
def test_a_topology_counts_free_nodes_and_places_no_pod(lab: QueueLab, queued: Operator) -> None:
    """What docs/kueue.md says of topology-aware scheduling: admission looks at nodes, pods go wherever the cluster's scheduler puts them."""
    kueue.make(lab.cluster, "topologies", "Topology", "hosts", levels=[{"nodeLabel": HOST}])
    lab.quota(9, flavor={"nodeLabels": {"gpu": "h100"}, "topologyName": "hosts"})
    lab.create("rljobs", job("first"))
    lab.wait_pods("first", 2, queued)
    lab.create("rljobs", job("second"))  # quota for it, and one node
    text = "doesn't allow to fit"
    lab.wait(lambda: text in lab.condition("second", "Ready").get("message", ""), "the refusal", queued)
    assert lab.pods("second") == []
    for pod in lab.list("pods"):
        assert pod["spec"]["nodeSelector"] == {"gpu": "h100"}
        assert "schedulingGates" not in pod["spec"]
    lab.delete("rljobs", "first")
    lab.wait_pods("second", 2, queued)


def test_multikueue_starts_no_job(lab: QueueLab, queued: Operator) -> None:
    """What docs/kueue.md says of it: a job that this operator brings about is rejected, and one of MultiKueue's has no Workload."""
    kubeconfig = base64.b64encode(lab.cluster.kubeconfig_for("multikueue", (MASTERS,)).read_bytes()).decode()
    secret = {"metadata": {"name": "worker"}, "data": {"kubeconfig": kubeconfig}}
    lab.cluster.api.create("/api/v1/namespaces/default/secrets", secret).expect()
    source = {"kubeConfig": {"location": "worker", "locationType": "Secret"}}
    kueue.make(lab.cluster, "multikueueclusters", "MultiKueueCluster", "worker", clusterSource=source)
    kueue.make(lab.cluster, "multikueueconfigs", "MultiKueueConfig", "workers", clusters=["worker"])
    parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "workers"}
    controller = "kueue.x-k8s.io/multikueue"
    kueue.make(
        lab.cluster, "admissionchecks", "AdmissionCheck", "multi", controllerName=controller, parameters=parameters
    )
    lab.quota(9, admissionChecksStrategy={"admissionChecks": [{"name": "multi"}]})
    lab.create("rljobs", job("theirs", managedBy=controller))
    lab.create("rljobs", job("ours"))
    lab.wait_reason("ours", "Evicted", queued)
    assert "multi, were rejected" in lab.condition("ours", "Ready")["message"]
    assert set(lab.workloads()) == {"rljob-ours"}
    status = lab.must("rljobs", "theirs")["status"]
    assert (status["observedGeneration"], status["conditions"]) == (UNSEEN_GENERATION, [])
