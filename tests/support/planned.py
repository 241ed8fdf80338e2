"""Jobs for the planner's tests, and what is planned for them."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.spec import RLJob, parse_job
from streamrl_operator.planning.objects import plan_objects
from streamrl_operator.planning.objects.shared import JobPlan
from streamrl_operator.planning.values import DesiredRun, PlanningSettings

NAMESPACE, UID = "team-a", "3f8e9c52-6a3b-4e0e-9d3e-0c7f7f0f1a11"
SETTINGS = PlanningSettings(
    namespace="streamrl-system", trainer_image="streamrl/trainer:1", generator_image="streamrl/generator:1"
)

_POD = {
    "image": "registry.example/trainer:7",
    "imagePullPolicy": "Always",
    "imagePullSecrets": ["registry"],
    "labels": {"team": "gpus"},
    "annotations": {"example.com/team": "a", "kubectl.kubernetes.io/default-container": "none"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "resources": {"requests": {"cpu": "4", "memory": "32Gi"}, "limits": {"nvidia.com/gpu": "2"}},
    "env": [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        {"name": "HF_HOME", "value": "/data/hub"},
        {"name": "EMPTY", "value": ""},
    ],
    "volumes": [
        {"name": "data", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
        {"name": "fast", "emptyDir": {"sizeLimit": "20Gi"}},
    ],
    "volumeMounts": [
        {"name": "data", "mountPath": "/data", "readOnly": True},
        {"name": "fast", "mountPath": "/tmp"},
    ],
    "priorityClassName": "research",
    "runtimeClassName": "nvidia",
}

_FULL: dict[str, Any] = {
    "apiVersion": "streamrl.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "full", "labels": {"team": "a"}, "annotations": {"note": "x"}},
    "spec": {
        "model": {"huggingFace": {"name": "Qwen/Qwen3-8B"}},
        "task": {
            "dataset": {"jsonl": {"path": "questions.jsonl"}},
            "code": {"configMapName": "full-code"},
            "sampling": {"maxTokens": 64},
            "rewards": [{"name": "answer", "exactMatch": {}}],
        },
        "pipeline": {"batchGroups": 4, "steps": 10},
        "generators": [
            {
                "name": "fixed",
                "engine": {"hf": {"slots": 8}},
                "scaling": {"static": {"replicas": 3}},
                "costPerHour": "2.50",
                "pod": _POD | {"image": "registry.example/generator:7"},
            },
            {"name": "auto", "engine": {"hf": {"slots": 8}}, "scaling": {"auto": {"minReplicas": 1, "maxReplicas": 5}}},
            {"name": "free", "engine": {"hf": {"slots": 8}}, "scaling": {"external": {"initialReplicas": 2}}},
        ],
        "trainer": {"processesPerNode": 2, "disruption": "Block", "costPerHour": "10.00", "pod": _POD},
        "storage": {
            "checkpoints": {"size": "100Gi", "storageClassName": "ssd", "whenDeleted": "Retain"},
            "journal": {"size": "1Gi"},
        },
    },
}


def full_document() -> dict[str, Any]:
    """A job that uses all that touches Kubernetes, as plain data of its own."""
    return copy.deepcopy(_FULL)


def agents_document() -> dict[str, Any]:
    """A job with a pool of agents, and all that its pods can be changed in."""
    document = full_document()
    spec = document["spec"]
    spec["task"] |= {
        "agent": {
            "command": ["python", "agent.py"],
            "pool": {
                "scaling": {"auto": {"maxReplicas": 4}},
                "egress": [
                    {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"], "ports": [443]},
                    {"cidr": "192.0.2.7/32"},
                ],
                "pod": {**_POD, "image": "registry.example/agents:3"},
            },
        },
        "rewards": [{"name": "agent", "environment": {}}],
    }
    return document


def full_job() -> RLJob:
    """The same, validated."""
    return parse_job(full_document())


def planned(
    job: RLJob,
    *,
    wanted: DesiredRun | None = None,
    settings: PlanningSettings = SETTINGS,
    resolved: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """What is planned for a running job. `resolved`: files of the ConfigMap that is there."""
    sizes = {pool.name: pool.scaling.initial for pool in job.spec.pools}
    running = DesiredRun(trainers=1, generators=sizes, images=settings.images)
    plan = JobPlan(
        job=job,
        namespace=NAMESPACE,
        uid=UID,
        wanted=wanted or running,
        settings=settings,
        resolved=resolved or {},
    )
    return plan_objects(plan)


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of this kind and name."""
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def templates(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(StatefulSet, pod template)."""
    for each in objects:
        if each["kind"] == "StatefulSet":
            yield each["metadata"]["name"], each["spec"]["template"]


def containers(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All containers of a pod template, in the order in which they start."""
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]
