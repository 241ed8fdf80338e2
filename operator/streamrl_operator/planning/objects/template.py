"""Pod templates: our containers and volumes, the job's changes merged over them, what must not be changed over both."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from streamrl import names
from streamrl.spec.containers import Resources
from streamrl.spec.core_v1 import PodFields, PodSecurityContext
from streamrl.spec.pod import Pod
from streamrl_operator.planning.objects import pod_group
from streamrl_operator.planning.objects.containers import Container, as_given, build, extra
from streamrl_operator.planning.objects.job_file import canonical
from streamrl_operator.planning.objects.shared import Built, JobPlan, annotated
from streamrl_operator.planning.values import PodPlacement

USER = 10_001
"""Number of user and group in the pods; the images make it, and any other image will do without."""

VOLUME_JOB, VOLUME_TLS, VOLUME_RUN, VOLUME_TMP, VOLUME_SHM, VOLUME_CACHE = (
    "streamrl-job",
    "streamrl-tls",
    "streamrl-run",
    "streamrl-tmp",
    "streamrl-shm",
    "streamrl-cache",
)
DIR_TMP = "/tmp"  # noqa: S108 - the pod's own
DIR_SHM = "/dev/shm"  # noqa: S108 - a mount of the pod's own

DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
"""Annotation of a pod: the container that people are shown."""
SMALL = Resources(requests={"cpu": "100m", "memory": "512Mi"})
"""Requests of a container beside the one that computes; without limits, since data sets and warm-ups differ."""
_SKIP_CONTAINERS = {"eks.amazonaws.com/skip-containers": ",", "azure.workload.identity/skip-containers": ";"}
"""Annotation of a pod that names containers which a cloud's webhook gives no token of the account -> what stands between two names."""
_OWNER_AND_GROUP_READ = 0o440
_REVISIONS_KEPT = 2
_ROLLING = {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
"""The API server's default. Written, it is ours, and goes when the strategy changes: one of OnDelete must not have it."""
_GATED = {"schedulingGates": [{"name": names.GATE}]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One kind of pod before the job's changes."""

    role: str
    pool: str | None = None
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
    """Where the job names none."""
    pod: Pod
    """The job's changes."""


def stateful_set(plan: JobPlan, name: str, *, replicas: int, template: Template, on_delete: bool = False) -> Built:
    """A StatefulSet; all of its pods start and end at once. `on_delete`: the operator replaces them after a change (`planning/replicas.py`)."""
    selector = plan.selector(role=template.role, pool=template.pool)
    held = name in plan.wanted.held
    admitted = plan.wanted.placements.get(name.removeprefix(f"{plan.name}-"))
    placement = admitted or PodPlacement()
    spec = {
        "replicas": replicas,
        "serviceName": name,
        "podManagementPolicy": "Parallel",  # the ordered one waits for ever to replace a pod that is not ready
        "revisionHistoryLimit": _REVISIONS_KEPT,
        # Pods that run stay while the template has a gate.
        "updateStrategy": {"type": "OnDelete"} if on_delete or held else _ROLLING,
        "selector": {"matchLabels": selector},
        "template": {
            "metadata": _metadata(plan, template, selector=selector, placement=placement),
            "spec": _pod_spec(plan, template, selector=selector, placement=placement) | (_GATED if held else {}),
        },
    }
    built = plan.object("apps/v1", "StatefulSet", name, pool=template.pool, spec=spec)
    kept = {} if admitted is None else {names.ANNOTATION_PLACEMENT: canonical(asdict(admitted))}
    return annotated(built, kept)


def _pod_spec(plan: JobPlan, template: Template, *, selector: Mapping[str, str], placement: PodPlacement) -> Built:
    pod = template.pod
    image = pod.image or template.image
    spec: Built = {
        **as_given(pod, only=PodFields),
        "serviceAccountName": plan.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service named `streamrl` would set STREAMRL_ variables
        "terminationGracePeriodSeconds": pod.termination_grace_period_seconds or template.grace_s,
        "shareProcessNamespace": template.shares_processes or None,
        "hostNetwork": pod.host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if pod.host_network else None,
        "securityContext": _security(pod, sets_user=plan.settings.sets_user),
        "initContainers": [
            *(extra(container) for container in pod.init_containers),
            *(build(container, image=image, pod=pod) for container in template.init_containers),
        ],
        "containers": [build(template.main, image=image, pod=pod), *(extra(one) for one in pod.containers)],
        "volumes": [
            *({"name": name, **source} for name, source in template.volumes.items()),
            *(as_given(volume) for volume in pod.volumes),
        ],
        "imagePullSecrets": [{"name": name} for name in pod.image_pull_secrets],
        "nodeSelector": {**pod.node_selector, **placement.node_selector},
        "tolerations": [*(as_given(toleration) for toleration in pod.tolerations), *placement.tolerations],
        "topologySpreadConstraints": [
            {
                "labelSelector": {"matchLabels": dict(selector)},
                **{key: value for key, value in constraint.items() if value is not None},
            }
            for constraint in pod.topology_spread_constraints
        ],
        "resourceClaims": [as_given(claim) for claim in pod.resource_claims],
        "schedulerName": pod.scheduler_name or pod_group.of_pods(plan)[2],
    }
    return {key: value for key, value in spec.items() if value not in (None, [], {})}  # False says something


def skipped_by_webhooks(container: str, *, given: Mapping[str, str]) -> dict[str, str]:
    """Annotations: a container with the user's code, beside those that the job names in `given`."""
    return {key: between.join(filter(None, (given.get(key), container))) for key, between in _SKIP_CONTAINERS.items()}


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


def shared_memory() -> Built:
    """Memory that the processes of a container share: a container's own 64 MiB are too little for NCCL and vLLM.

    Without a `sizeLimit`: Kubernetes gives it the size of the pod's memory limit, and what lies there counts towards that. A lower one would have to
    know the model's size; a pod above it is evicted.
    """
    return {"emptyDir": {"medium": "Memory"}}


def _metadata(plan: JobPlan, template: Template, *, selector: Mapping[str, str], placement: PodPlacement) -> Built:
    ours = {DEFAULT_CONTAINER: template.main.name, **template.annotations}
    labels, annotations, _ = pod_group.of_pods(plan)
    own = {**plan.labels(pool=template.pool), **selector}
    return {
        "labels": {**template.pod.labels, **placement.labels, **labels, **own},
        "annotations": {**template.pod.annotations, **placement.annotations, **annotations, **ours},
    }


def _security(pod: Pod, *, sets_user: bool) -> Built:
    user = {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER} if sets_user else {}
    return {
        "runAsNonRoot": True,
        **user,
        **as_given(pod.security_context, only=PodSecurityContext),
        "fsGroupChangePolicy": "OnRootMismatch",  # a volume of checkpoints holds too many files to walk at each start
        "seccompProfile": {"type": "RuntimeDefault"},
    }
