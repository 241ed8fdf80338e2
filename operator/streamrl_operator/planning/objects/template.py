"""Pod templates: our containers and volumes, the job's changes merged over them, what must not be changed over both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl import API_GROUP, names
from streamrl.spec.pod import Pod
from streamrl_operator.planning.objects.containers import Container, build
from streamrl_operator.planning.objects.shared import Built, JobPlan

USER = 10_001
"""Number of user and group in the pods; the images make it, and any other image will do without."""

VOLUME_JOB, VOLUME_TLS, VOLUME_RUN, VOLUME_TMP = "streamrl-job", "streamrl-tls", "streamrl-run", "streamrl-tmp"
DIR_TMP = "/tmp"  # noqa: S108 - the pod's own

_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_OWNER_AND_GROUP_READ = 0o440


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One kind of pod before the job's changes."""

    selector: Mapping[str, str]
    labels: Mapping[str, str]
    annotations: Mapping[str, str] = field(default_factory=dict)
    grace_s: int
    shares_processes: bool = False
    """Whether the containers see each other's processes. Then none of ours is the first process of all, which is deaf to SIGTERM until it
    has a handler: a pod that is deleted while it starts would stay for all of `grace_s`."""
    init_containers: Sequence[Container] = ()
    main: Container
    volumes: Mapping[str, Built]
    """Name -> source."""
    image: str


def build_template(template: Template, *, plan: JobPlan, pod: Pod) -> Built:
    """The pod template of a StatefulSet."""
    image = pod.image or template.image
    spec: Built = {
        "serviceAccountName": names.service_account(plan.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service named `streamrl` would set STREAMRL_ variables
        "terminationGracePeriodSeconds": template.grace_s,
        "shareProcessNamespace": template.shares_processes or None,
        "securityContext": _security(),
        "initContainers": [build(container, image=image, pod=pod) for container in template.init_containers],
        "containers": [build(template.main, image=image, pod=pod)],
        "volumes": [{"name": name, **source} for name, source in template.volumes.items()] + _volumes(pod),
    }
    return {"metadata": _metadata(template, pod=pod), "spec": _without_empty(spec | _placement(pod))}


def secret(name: str) -> Built:
    """A Secret as a volume, readable for our group alone."""
    return {"secret": {"secretName": name, "defaultMode": _OWNER_AND_GROUP_READ}}


def config_map(name: str) -> Built:
    """A ConfigMap as a volume."""
    return {"configMap": {"name": name}}


def claim(name: str) -> Built:
    """A PersistentVolumeClaim as a volume."""
    return {"persistentVolumeClaim": {"claimName": name}}


def scratch() -> Built:
    """Space that ends with the pod."""
    return {"emptyDir": {}}


def _metadata(template: Template, *, pod: Pod) -> Built:
    ours = {_DEFAULT_CONTAINER: template.main.name, **template.annotations}
    return {
        "labels": {**_theirs(pod.labels), **template.labels, **template.selector},
        "annotations": {**_theirs(pod.annotations), **ours},
    }


def _theirs(given: Mapping[str, str]) -> dict[str, str]:
    """Without names of our own group: by those pods are found."""
    return {key: value for key, value in given.items() if not key.startswith(f"{API_GROUP}/")}


def _security() -> Built:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",  # a volume of checkpoints holds too many files to walk at each start
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _volumes(pod: Pod) -> list[Built]:
    return [_given(volume) for volume in pod.volumes]


def _placement(pod: Pod) -> Built:
    """Where the pod may run, as far as the job says."""
    return {
        "imagePullSecrets": [{"name": name} for name in pod.image_pull_secrets],
        "nodeSelector": dict(pod.node_selector),
        "tolerations": [_given(toleration) for toleration in pod.tolerations],
        "affinity": dict(pod.affinity),
        "priorityClassName": pod.priority_class_name,
        "runtimeClassName": pod.runtime_class_name,
    }


def _without_empty(spec: Built) -> Built:
    """Without what says nothing; False says something."""
    return {key: value for key, value in spec.items() if value not in (None, [], {})}


def _given(part: Any) -> Built:  # noqa: ANN401 - any piece of a Pod's specification
    built: Built = part.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return built
