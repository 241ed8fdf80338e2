"""What a user may change of the pods on Kubernetes: pieces spelled as in a Pod, merged over what the operator makes.

Owns shape and bounds, also of what administrators let jobs inherit (`RLJobDefaults`); which of several words counts, the operator says
(`planning/defaults.py`). Commands, own ports, probes and security contexts are the operator's and cannot be overridden
(decisions 0012, 0041). A local run does not use any of this.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl import API_GROUP
from streamrl.names import LABEL_INSTANCE, LABEL_MANAGED_BY, LABEL_NAME, LABEL_QUEUE
from streamrl.spec.base import FieldRule, OneOf, SpecModel, map_by
from streamrl.spec.containers import EnvFrom, EnvVar, ExtraContainer, MainResources, Resources
from streamrl.spec.core_v1 import Lifecycle, PodField, PodFields, PodSecurityContext
from streamrl.spec.volumes import LabelValue, ObjectName, Volume, VolumeMount, WeightCacheSpec, Word

Text = Annotated[str, StringConstraints(max_length=4096)]

OTHER_NETWORKS = ("k8s.v1.cni.cncf.io/", "v1.multus-cni.io/", "networking.gke.io/")
"""Beginnings of annotations that give a pod further networks, which NetworkPolicies do not see: for namespaces with the node's network."""


def _without_keys(fields: tuple[str, ...], prefixes: tuple[str, ...], why: str) -> FieldRule:
    """Return the rule that no key of these mappings begins so."""
    message = f"{' and '.join(fields)} must not have keys of {', '.join(prefixes)}: {why}"
    one = f"k.startsWith('{prefixes[0]}')" if len(prefixes) == 1 else f"{list(prefixes)}.exists(p, k.startsWith(p))"
    cel = " && ".join(f"(!has(self.{field}) || self.{field}.all(k, !{one}))" for field in fields)
    return FieldRule(message, cel, "{k}")


_OF_THIS_POD = "has(self.volumes) && self.volumes.exists(v, v.name == m.name)"
METADATA_RULES = (
    _without_keys(
        ("labels", "annotations"),
        (f"{API_GROUP}/",),
        "the operator finds its pods by those; use a prefix of your own",
    ),
    _without_keys(
        ("labels", "annotations"),
        (f"{LABEL_QUEUE.partition('/')[0]}/",),
        "Kueue would admit each pod by itself; for a queue use metadata.labels of the job",
    ),
    _without_keys(
        ("annotations",),
        (
            "container.apparmor.security.beta.kubernetes.io/",
            "container.seccomp.security.alpha.kubernetes.io/",
            "seccomp.security.alpha.kubernetes.io/",
            "security.alpha.kubernetes.io/",
        ),
        "the operator sets the profiles of Pod Security 'restricted'; for others use a policy of the cluster",
    ),
    _without_keys(
        ("annotations",),
        (
            *("io.kubernetes.cri", "run.oci.", "cdi.k8s.io/"),
            *("cdi-devices.noderesource.dev/", "devices.noderesource.dev/", "mounts.noderesource.dev/"),
            *("cdi-devices.nri.io/", "devices.nri.io/", "mounts.nri.io/"),
        ),
        "they ask the node's container runtime for devices and files past Pod Security; use resources or resourceClaims",
    ),
)
"""What labels and annotations must not loosen: the one list. Keys that webhooks read are no part of it, since Pod Security checks what those make."""


class CommonMetadata(SpecModel):
    """Labels and annotations of all that the operator makes for the job; pods have pod.labels and pod.annotations."""

    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=32, description="Labels.")
    annotations: dict[str, Text] = Field(
        default_factory=dict, max_length=32, description="Annotations; in member clusters there are none."
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        *METADATA_RULES,
        _without_keys(
            ("labels", "annotations"),
            (
                *(LABEL_INSTANCE, LABEL_MANAGED_BY, LABEL_NAME),
                *(
                    "argocd.argoproj.io/",
                    "helm.sh/",
                    "meta.helm.sh/",
                    "kubectl.kubernetes.io/",
                    "applyset.kubernetes.io/",
                ),
                *("kustomize.toolkit.fluxcd.io/", "helm.toolkit.fluxcd.io/", "config.k8s.io/", "kapp.k14s.io/"),
            ),
            "by those tools delete what is not in their files, such as a claim that outlives the job; leave them out",
        ),
    )


class ServiceAccount(SpecModel):
    """The account of all pods of the job; the operator makes it and binds no right to it."""

    name: ObjectName | None = Field(
        default=None, description="Its name; absent = <job>-pods. One that exists is refused."
    )
    annotations: dict[str, Text] = Field(
        default_factory=dict, max_length=16, description="Such as the cloud's role (IRSA, Workload Identity)."
    )


class ResourceClaim(OneOf):
    """Devices that the cluster's drivers give (DRA)."""

    one_of: ClassVar[tuple[str, ...]] = ("resource_claim_name", "resource_claim_template_name")

    name: Word = Field(description="By which resources.claims name it.")
    resource_claim_name: ObjectName | None = Field(default=None, description="A ResourceClaim that exists.")
    resource_claim_template_name: ObjectName | None = Field(
        default=None, description="A ResourceClaimTemplate: a claim for each pod."
    )


PRIVILEGED = "a pod must not rule its node; for devices use resources or resourceClaims"


class AddedCapabilities(SpecModel):
    """Linux capabilities of the main container."""

    add: tuple[Literal["IPC_LOCK"], ...] = Field(
        default=(),
        max_length=1,
        description="Memory locked for RDMA; only in namespaces where the administrator allows it.",
    )


class MainSecurity(PodSecurityContext):
    """What may be chosen within Pod Security "restricted", and asked for beside it."""

    capabilities: AddedCapabilities = Field(default=AddedCapabilities(), description="IPC_LOCK.")

    refused: ClassVar[Mapping[str, str]] = {
        "privileged": PRIVILEGED,
        **dict.fromkeys(
            ("runAsNonRoot", "seccompProfile"), "the operator sets that of Pod Security 'restricted' for all pods"
        ),
    }


class Pod(PodFields):
    """Changes to the pods that the operator makes; not used by a local run."""

    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image of the pod's containers; absent = the operator's.",
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="When the image is pulled."
    )
    image_pull_secrets: tuple[ObjectName, ...] = Field(
        default=(), max_length=8, description="Names of Secrets for the registry."
    )
    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=32, description="More labels.")
    annotations: dict[str, Text] = Field(default_factory=dict, max_length=32, description="More annotations.")
    resources: MainResources = Field(default=MainResources(), description="Of the main container.")
    resource_claims: tuple[ResourceClaim, ...] = Field(
        default=(), max_length=8, description="Devices (DRA) of the pod.", json_schema_extra=map_by("name")
    )
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=32,
        description="Environment of all containers of ours.",
        json_schema_extra=map_by("name"),
    )
    env_from: tuple[EnvFrom, ...] = Field(
        default=(), max_length=8, description="More environment of all containers of ours; env goes over it."
    )
    volumes: tuple[Volume, ...] = Field(
        default=(), max_length=16, description="More volumes.", json_schema_extra=map_by("name")
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        max_length=16,
        description="Where all containers of ours see them.",
        json_schema_extra=map_by("mountPath"),
    )
    host_network: bool = Field(
        default=False,
        description="Their node's network, for RDMA; only in namespaces where the administrator allows it.",
    )
    lifecycle: Lifecycle | None = Field(default=None, description="Hooks of the main container.")
    security_context: MainSecurity = Field(
        default=MainSecurity(), description="The operator sets that of Pod Security 'restricted'; this is added."
    )
    termination_grace_period_seconds: int | None = Field(
        default=None, ge=10, le=86_400, description="Between SIGTERM and SIGKILL; absent = the operator's."
    )
    init_containers: tuple[ExtraContainer, ...] = Field(
        default=(),
        max_length=4,
        description="Before ours, in this order; with restartPolicy Always beside them.",
        json_schema_extra=map_by("name"),
    )
    containers: tuple[ExtraContainer, ...] = Field(
        default=(), max_length=4, description="Beside ours.", json_schema_extra=map_by("name")
    )

    @property
    def locks_memory(self) -> bool:
        """Whether the main container may."""
        return bool(self.security_context.capabilities.add)

    refused: ClassVar[Mapping[str, str]] = {
        "privileged": PRIVILEGED,
        "hostPID": "a pod must not see its node's processes; what needs that runs beside StreamRL, in pods of its own",
        "hostIPC": "a pod must not share its node's memory; use an emptyDir of medium Memory at /dev/shm",
        **dict.fromkeys(("serviceAccountName", "serviceAccount"), "all pods have the job's; use spec.serviceAccount"),
        "automountServiceAccountToken": "no pod speaks to the API; for a token use a projected volume",
        **dict.fromkeys(("command", "args"), "what runs is the operator's; use image for another one"),
        "restartPolicy": "the pods are a StatefulSet's, which are always started again; use spec.failurePolicy",
        "nodeName": "the cluster's scheduler places the pods; use nodeSelector",
    }
    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        *METADATA_RULES,
        FieldRule(
            "volumeMounts must name volumes of this pod",
            f"(!has(self.volumeMounts) || self.volumeMounts.all(m, {_OF_THIS_POD})) && "
            + " && ".join(
                f"(!has(self.{field}) || self.{field}.all(c, !has(c.volumeMounts) || c.volumeMounts.all(m, {_OF_THIS_POD})))"
                for field in ("initContainers", "containers")
            ),
        ),
        FieldRule(
            "names of initContainers and containers must differ",
            "!has(self.containers) || !has(self.initContainers) || "
            "self.containers.all(c, !self.initContainers.exists(i, i.name == c.name))",
            "{c.name}",
        ),
        FieldRule(
            "resources.claims must name resourceClaims of this pod",
            "!has(self.resources) || !has(self.resources.claims) || "
            "self.resources.claims.all(c, has(self.resourceClaims) && self.resourceClaims.exists(r, r.name == c.name))",
        ),
    )


class TrainerPod(Pod):
    """Changes to the trainer's pods; not used by a local run."""

    prepare_resources: Resources | None = Field(
        default=None, description="Of the container that makes the model ready; absent = requests of 100m and 512Mi."
    )
    scheduler_resources: Resources | None = Field(
        default=None, description="Of the scheduler; absent = as prepare, and 2Gi with a ranker that needs torch."
    )
    tasks_image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Image of the container that runs data set, rewards and environment; absent = that of the pod.",
    )
    tasks_resources: Resources | None = Field(
        default=None, description="Of that container, whose memory all task.processes share; absent = as prepare."
    )
    scheduler_start_seconds: int = Field(
        default=1800, ge=60, le=86_400, description="In which the scheduler reads its data set and replays its journal."
    )


class GeneratorPod(Pod):
    """Changes to the pods of a pool; not used by a local run."""

    max_unavailable: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Pods of the pool that are away at once while a change replaces them; absent = one after another.",
    )


DEFAULTS_NAME = "default"
"""Of the one object of a namespace."""
Image = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Enforceable = Literal[
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "labels",
    "annotations",
    "resources",
    "resourceClaims",
    "env",
    "envFrom",
    "volumes",
    "volumeMounts",
    "terminationGracePeriodSeconds",
    "initContainers",
    "containers",
    "storageClassName",
    PodField,
]


class DefaultImages(SpecModel):
    """Images by role."""

    trainer: Image | None = Field(default=None, description="Of the trainer's pods.")
    generator: Image | None = Field(default=None, description="Of generators.")


class RLJobDefaultsSpec(SpecModel):
    """What jobs inherit."""

    images: DefaultImages = Field(default=DefaultImages(), description="Images by role; over pod.image.")
    pod: Pod = Field(default=Pod(), description="Of all pods of a job, as in its trainer.pod and generators[].pod.")
    storage_class_name: ObjectName | None = Field(
        default=None, description="Storage class of the claims that are made; absent = the cluster's."
    )
    weight_cache: WeightCacheSpec | None = Field(
        default=None, description="Of all pools, as in generators[].weightCache; its volume stands in pod."
    )
    enforced: tuple[Enforceable, ...] = Field(
        default=(),
        max_length=32,
        description="Fields in which these defaults go over what a job says: key by key where there are keys, else whole.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "fields of enforced must differ",
            "self.enforced.all(e, self.enforced.exists_one(o, o == e))",
            "{e}",
        ),
    )


class DefaultsMetadata(SpecModel):
    """Which object it is."""

    name: Literal["default"] = Field(description=f"{DEFAULTS_NAME}: a namespace has one.")
    namespace: str | None = Field(default=None, max_length=63, description="The namespace of the jobs.")
    labels: dict[str, str] | None = Field(default=None, description="Labels.")
    annotations: dict[str, str] | None = Field(default=None, description="Annotations.")


class RLJobDefaults(SpecModel):
    """What the RLJobs of a namespace have unless they say otherwise; taken when a job begins, and kept."""

    api_version: Literal["streamrl.io/v1alpha1"] = Field(description="streamrl.io/v1alpha1")
    kind: Literal["RLJobDefaults"] = Field(description="RLJobDefaults")
    metadata: DefaultsMetadata = Field(description="Its name is default.")
    spec: RLJobDefaultsSpec = Field(default=RLJobDefaultsSpec(), description="What jobs inherit.")
