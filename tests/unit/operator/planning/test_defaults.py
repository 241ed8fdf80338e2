"""What jobs inherit from administrators: which word counts, where it is from, and what is told of a mistake."""

import json
from dataclasses import replace
from typing import Any

import pytest

from streamrl.errors import UserErrors
from streamrl.spec import RLJob, parse_job
from streamrl_operator.planning.defaults import Entry, inherit, read_layers, refused_here, write_layers
from support.planned import SETTINGS, find, full_document, full_job, planned

CLUSTER, NAMESPACE = "the chart's jobDefaults", "RLJobDefaults team-a/default"


def job(pod: dict[str, Any] | None = None, **spec: Any) -> RLJob:
    document = full_document()
    document["spec"] |= spec
    for each in (document["spec"]["trainer"], *document["spec"]["generators"]):
        each["pod"] = pod or {}
    return parse_job(document)


def inherited(
    given: RLJob, cluster: dict[str, Any] | None = None, namespace: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The trainer's pod, and where what is not its own is from."""
    layers = read_layers(write_layers({CLUSTER: cluster, NAMESPACE: namespace}))
    merged, origins = inherit(given, layers)
    pod = merged.spec.trainer.pod.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return pod, {one.field.removeprefix("spec.trainer.pod."): one for one in origins}


def test_the_nearest_word_counts() -> None:
    cluster = {"pod": {"priorityClassName": "low", "nodeSelector": {"gpu": "l40s", "zone": "a"}}}
    namespace = {"pod": {"nodeSelector": {"zone": "b"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]}}
    pod, origins = inherited(job({"nodeSelector": {"gpu": "h100"}}), cluster, namespace)
    assert pod == {
        "priorityClassName": "low",
        "nodeSelector": {"gpu": "h100", "zone": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    assert {field: one.source for field, one in origins.items() if not field.startswith("spec.")} == {
        "priorityClassName": CLUSTER,
        "nodeSelector.zone": NAMESPACE,
        "tolerations": NAMESPACE,
    }


def test_lists_grow_by_key_and_each_item_is_there_once() -> None:
    taint = {"key": "spot", "operator": "Exists"}
    default = {
        "env": [{"name": "HF_HOME", "value": "/cache"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
        "volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "models"}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "tolerations": [taint],
        "imagePullSecrets": ["registry"],
        "resources": {"requests": {"cpu": 2}, "limits": {"memory": "8Gi"}},
    }
    own = {
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}, taint],
        "imagePullSecrets": ["mine", "registry"],
        "resources": {"limits": {"nvidia.com/gpu": 2}},
    }
    pod, origins = inherited(job(own), {"pod": default})
    assert pod["env"] == [{"name": "HF_HOME", "value": "/cache"}, {"name": "NCCL_DEBUG", "value": "WARN"}]
    assert pod["tolerations"] == [taint, {"key": "gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == ["registry", "mine"]
    assert pod["resources"] == {"requests": {"cpu": "2"}, "limits": {"memory": "8Gi", "nvidia.com/gpu": "2"}}
    assert {"env[HF_HOME]", "volumes[cache]", "volumeMounts[/cache]", "resources.limits.memory"} <= set(origins)
    assert "env[NCCL_DEBUG]" not in origins


def test_enforced_fields_are_the_farthest_administrators() -> None:
    cluster = {"pod": {"nodeSelector": {"team": "a"}}, "enforced": ["nodeSelector", "priorityClassName"]}
    namespace = {
        "pod": {"nodeSelector": {"team": "b", "zone": "b"}, "tolerations": [{"key": "x", "operator": "Exists"}]},
        "enforced": ["tolerations", "nodeSelector"],
    }
    own = {
        "nodeSelector": {"team": "c", "zone": "c", "gpu": "h100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
    }
    pod, origins = inherited(job(own), cluster, namespace)
    assert pod == {
        "nodeSelector": {"team": "a", "zone": "b", "gpu": "h100"},
        "tolerations": [{"key": "x", "operator": "Exists"}],
    }
    assert (origins["nodeSelector.team"].source, origins["nodeSelector.team"].is_enforced) == (CLUSTER, True)
    assert (origins["nodeSelector.zone"].source, origins["nodeSelector.zone"].is_enforced) == (NAMESPACE, True)
    assert "nodeSelector.gpu" not in origins
    left_out = origins["priorityClassName"]
    assert (left_out.value, left_out.source, left_out.is_enforced) == (None, CLUSTER, True)


def test_an_enforced_image_is_that_of_all_our_containers() -> None:
    own = {"image": "mine:1", "tasksImage": "mine:2"}
    document = full_document()
    document["spec"]["trainer"]["pod"] = own
    given = parse_job(document)
    pod, origins = inherited(given, {"images": {"trainer": "t:9"}, "enforced": ["image"]})
    assert pod == {"image": "t:9"}
    left_out = origins["tasksImage"]
    assert (left_out.value, left_out.source, left_out.is_enforced) == (None, CLUSTER, True)
    assert inherited(given, {"images": {"trainer": "t:9"}})[0] == own


def test_images_are_by_role_and_claims_have_a_class() -> None:
    default = {"images": {"trainer": "t:9", "generator": "g:9"}, "pod": {"image": "x:9"}, "storageClassName": "fast"}
    layers = read_layers(write_layers({NAMESPACE: default}))
    given = job(storage={"checkpoints": {"storageClassName": "slow"}})
    merged, origins = inherit(given, layers)
    assert merged.spec.trainer.pod.image == "t:9"
    assert {pool.pod.image for pool in merged.spec.generators} == {"g:9"}
    objects = planned(merged)
    assert find(objects, "PersistentVolumeClaim", "full-journal")["spec"]["storageClassName"] == "fast"
    assert find(objects, "PersistentVolumeClaim", "full-checkpoints")["spec"]["storageClassName"] == "slow"
    assert [one.field for one in origins if "storage" in one.field] == ["spec.storage.journal.storageClassName"]
    mine = job(storage={"checkpoints": {"claimName": "mine"}})
    assert inherit(mine, layers)[0].spec.storage.checkpoints.storage_class_name is None


def test_pools_without_a_cache_of_their_own_have_the_default_one() -> None:
    layers = read_layers(write_layers({NAMESPACE: {"weightCache": {"path": "/cache", "maxBytes": "1Ti"}}}))
    document = full_document()
    document["spec"]["generators"][0]["weightCache"] = {"path": "/mine", "maxBytes": "9Gi"}
    merged, origins = inherit(parse_job(document), layers)
    first, *others = merged.spec.generators
    assert first.weight_cache is not None
    assert (first.weight_cache.path, first.weight_cache.max_bytes) == ("/mine", "9Gi")
    assert others
    assert all(pool.weight_cache and pool.weight_cache.path == "/cache" for pool in others)
    assert "spec.generators[1].weightCache.maxBytes" in {one.field for one in origins}


@pytest.mark.parametrize("given", [full_job(), job()])
def test_without_defaults_a_job_is_what_it_was(given: RLJob) -> None:
    assert inherit(given, ()) == (given, ())
    nothing = read_layers(write_layers({CLUSTER: {}, NAMESPACE: {"enforced": []}}))
    assert inherit(given, nothing)[0] == given
    something = read_layers(write_layers({CLUSTER: {"enforced": ["schedulerName"]}}))
    assert inherit(given, something) == (given, ())


def test_what_is_written_down_is_short_and_always_the_same() -> None:
    """What an API server fills in is left out."""
    spec = {
        "images": {},
        "enforced": [],
        "pod": {"imagePullPolicy": "IfNotPresent", "env": [], "nodeSelector": {"a": "b"}},
    }
    text = write_layers({CLUSTER: None, NAMESPACE: spec})
    assert json.loads(text) == [{"source": NAMESPACE, "spec": {"pod": {"nodeSelector": {"a": "b"}}}}]
    assert write_layers({CLUSTER: {}, NAMESPACE: {"pod": {}}}) == ""
    assert (
        write_layers({NAMESPACE: read_layers(text)[0].spec.model_dump(mode="json", by_alias=True, exclude_none=True)})
        == text
    )


def test_a_mistake_is_told_with_its_object_and_field() -> None:
    with pytest.raises(UserErrors) as told:
        read_layers(
            write_layers({NAMESPACE: {"pod": {"tolerations": [{"effect": "Never"}]}, "enforced": ["env", "spot"]}})
        )
    assert [line.split(", got")[0] for line in told.value.lines] == [
        f"{NAMESPACE}: spec.pod.tolerations[0].effect: must be one of NoSchedule, PreferNoSchedule, NoExecute",
        told.value.lines[1].split(", got")[0],
    ]
    assert told.value.lines[1].startswith(f"{NAMESPACE}: spec.enforced[1]: must be one of image, imagePullPolicy, ")


def test_defaults_that_do_not_go_with_a_job_are_told() -> None:
    sidecar = {"name": "logs", "image": "logs:1"}
    layers = read_layers(write_layers({NAMESPACE: {"pod": {"containers": [sidecar]}}}))
    with pytest.raises(
        UserErrors, match=rf"spec.trainer.pod: with {NAMESPACE}: names of initContainers and containers"
    ):
        inherit(job({"initContainers": [sidecar]}), layers)


def test_another_network_is_for_the_same_namespaces() -> None:
    """NetworkPolicies see neither."""
    given = job({"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma-net", "team": "a"}})
    fields = [one.field for one in refused_here(given, namespace="team-a", settings=SETTINGS)]
    assert fields[0] == "spec.trainer.pod.annotations.k8s.v1.cni.cncf.io/networks"
    assert len(fields) == 4
    assert refused_here(given, namespace="team-a", settings=replace(SETTINGS, rdma_namespaces=("team-a",))) == []


def test_defaults_of_an_administrator_keep_the_same_rules() -> None:
    annotations = {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}
    with pytest.raises(UserErrors, match=rf"{NAMESPACE}: spec.pod: annotations must not have keys of"):
        inherit(job(), read_layers(write_layers({NAMESPACE: {"pod": {"annotations": annotations}}})))


def test_the_nodes_network_is_for_some_namespaces() -> None:
    asked = {"hostNetwork": True, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
    given = job(asked)
    lines = [str(one) for one in refused_here(given, namespace="team-a", settings=SETTINGS)]
    assert len(lines) == 8
    assert lines[0] == (
        "spec.trainer.pod.hostNetwork: is refused: the administrator does not allow it in namespace team-a; "
        "use resources or resourceClaims of a device plugin, or ask for the chart's rdmaNamespaces"
    )
    assert refused_here(job(), namespace="team-a", settings=SETTINGS) == []
    pod = find(planned(given), "StatefulSet", "full-trainer")["spec"]["template"]["spec"]
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    added = {one["name"]: one["securityContext"]["capabilities"].get("add") for one in pod["containers"]}
    assert added == {"trainer": ["IPC_LOCK"]}
    beside = [one["securityContext"]["capabilities"] for one in pod["initContainers"]]
    assert beside == [{"drop": ["ALL"]}] * 3


@pytest.mark.parametrize("mode", ["StreamAsync", "Colocated"])
def test_pods_do_not_share_the_trainers_devices(mode: str) -> None:
    """With mode Colocated they take turns, each on devices of its own: the field says there what goes without saying."""
    pools = [{"name": "own", "engine": {"hf": {}}}, {"name": "lent", "engine": {"hf": {}}, "devices": "Trainer"}]
    given = job(generators=pools, pipeline={"mode": mode, "batchGroups": 4, "steps": 9})
    lines = [str(one) for one in refused_here(given, namespace="team-a", settings=SETTINGS)]
    line = "spec.generators[1].devices: must not be Trainer on a cluster: a pod has devices of its own, got 'Trainer'; leave it out, or use streamrl run"
    assert lines == ([] if mode == "Colocated" else [line])
