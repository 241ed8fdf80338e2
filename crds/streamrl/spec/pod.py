"""What a user may change of the pods on Kubernetes: few fields, typed, merged over what the operator makes.

Owns shape and bounds. Commands, own ports, probes and security contexts are the operator's and cannot be overridden
(decision 0012). A local run does not use any of this.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, StringConstraints, model_validator

from streamrl.spec.base import NAME_PATTERN, FieldRule, OneOf, SpecModel, demand_different, map_by

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
Quantity = Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN, max_length=20)]
"""An amount as Kubernetes writes it: `500m`, `8Gi`, `2`."""
OBJECT_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ObjectName = Annotated[str, StringConstraints(pattern=OBJECT_PATTERN, min_length=1, max_length=253)]
"""Name of an object in the job's namespace."""
LABEL_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, StringConstraints(pattern=LABEL_PATTERN, max_length=63)]
Text = Annotated[str, StringConstraints(max_length=4096)]
Word = Annotated[str, StringConstraints(min_length=1, max_length=253)]


def _segment(barred: str) -> str:
    """Pattern of one part of a path: neither empty nor `.` nor `..`, so that each directory has one spelling."""
    free, start = rf"[^/{barred}\x00-\x1f\x7f]", rf"[^/.{barred}\x00-\x1f\x7f]"
    return rf"(\.?{start}{free}*|\.\.{free}+)"


PATH_PATTERN = rf"^(/{_segment(':')})+$"
AbsolutePath = Annotated[str, StringConstraints(pattern=PATH_PATTERN, max_length=1024)]
"""Of a directory in a container; what compares paths can compare their text."""
SUB_PATH_PATTERN = rf"^{_segment('')}(/{_segment('')})*$"
SubPath = Annotated[str, StringConstraints(pattern=SUB_PATH_PATTERN, max_length=1024)]
"""Of a directory in a volume; it does not leave it."""

OWN_PREFIX = "STREAMRL_"
"""Environment variables that the operator sets."""
OWN_DIRS = ("/etc/streamrl/", "/var/lib/streamrl/")
"""Directories in which the operator mounts: job, certificates, code, run, checkpoints."""


class Resources(SpecModel):
    """Requests and limits of the main container."""

    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Amounts that the scheduler of the cluster reserves."
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Amounts that it may not exceed; GPUs stand here."
    )


class Toleration(SpecModel):
    """A taint that does not keep the pod away."""

    key: str | None = Field(default=None, max_length=317, description="The taint's key; absent = all.")
    operator: Literal["Exists", "Equal"] = Field(default="Equal", description="Exists or Equal.")
    value: str | None = Field(default=None, max_length=63, description="The taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        default=None, description="The taint's effect; absent = all."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=31_536_000, description="For NoExecute: so long; absent = for ever."
    )


class SecretKey(SpecModel):
    """One key of a Secret in the job's namespace."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: Word = Field(description="Key in it.")


class EnvVar(SpecModel):
    """An environment variable."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] = Field(
        description="Name; those that begin with STREAMRL_ are the operator's."
    )
    value: str | None = Field(default=None, max_length=4096, description="Its value.")
    secret_key: SecretKey | None = Field(default=None, description="Or the Secret that holds it.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "needs exactly one of value, secretKey",
            "has(self.value) != has(self.secretKey)",
            lambda variable: (variable.value is None) == (variable.secret_key is None),
        ),
        FieldRule(
            "name must not begin with STREAMRL_: the operator sets those",
            "!self.name.startsWith('STREAMRL_')",
            lambda variable: variable.name.startswith(OWN_PREFIX),
        ),
    )


class ClaimVolume(SpecModel):
    """A persistent volume claim."""

    claim_name: ObjectName = Field(description="Name of the claim.")
    read_only: bool = Field(default=False, description="Mounted for reading only.")


class ConfigMapVolume(SpecModel):
    """A ConfigMap as files."""

    name: ObjectName = Field(description="Name of the ConfigMap.")


class SecretVolume(SpecModel):
    """A Secret as files."""

    secret_name: ObjectName = Field(description="Name of the Secret.")


class EmptyDirVolume(SpecModel):
    """Scratch space that ends with the pod."""

    medium: Literal["", "Memory"] = Field(default="", description="Memory: in main memory.")
    size_limit: Quantity | None = Field(default=None, description="At most so much.")


class Volume(OneOf):
    """A volume of the pod."""

    one_of: ClassVar[tuple[str, ...]] = ("persistent_volume_claim", "config_map", "secret", "empty_dir")

    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=40)] = Field(
        description="Name of the volume; those that begin with streamrl- are the operator's."
    )
    persistent_volume_claim: ClaimVolume | None = Field(default=None, description="A persistent volume claim.")
    config_map: ConfigMapVolume | None = Field(default=None, description="A ConfigMap as files.")
    secret: SecretVolume | None = Field(default=None, description="A Secret as files.")
    empty_dir: EmptyDirVolume | None = Field(default=None, description="Scratch space that ends with the pod.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "name must not begin with streamrl-: the operator makes those",
            "!self.name.startsWith('streamrl-')",
            lambda volume: volume.name.startswith("streamrl-"),
        ),
    )


class VolumeMount(SpecModel):
    """Where the containers of the pod see a volume."""

    name: Word = Field(description="Name of the volume.")
    mount_path: AbsolutePath = Field(description="Directory in the container.")
    sub_path: SubPath | None = Field(default=None, description="Directory in the volume; absent = all.")
    read_only: bool = Field(default=False, description="For reading only.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "mountPath must not lie in, or hold, /etc/streamrl or /var/lib/streamrl: those are the operator's",
            f"{list(OWN_DIRS)}.all(own, !(self.mountPath + '/').startsWith(own) && !own.startsWith(self.mountPath + '/'))",
            lambda mount: any(
                f"{mount.mount_path}/".startswith(own) or own.startswith(f"{mount.mount_path}/") for own in OWN_DIRS
            ),
        ),
    )


class Pod(SpecModel):
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
    labels: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=32, description="More labels; Kueue's queue name stands here."
    )
    annotations: dict[str, Text] = Field(default_factory=dict, max_length=32, description="More annotations.")
    node_selector: dict[str, LabelValue] = Field(
        default_factory=dict, max_length=32, description="Labels that a node must have."
    )
    tolerations: tuple[Toleration, ...] = Field(
        default=(), max_length=16, description="Taints that do not keep the pods away."
    )
    affinity: dict[str, JsonValue] = Field(
        default_factory=dict,
        max_length=3,
        description="nodeAffinity, podAffinity, podAntiAffinity as in a Pod.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    resources: Resources = Field(default=Resources(), description="Requests and limits of the main container.")
    env: tuple[EnvVar, ...] = Field(
        default=(),
        max_length=32,
        description="Environment of all containers of the pod.",
        json_schema_extra=map_by("name"),
    )
    volumes: tuple[Volume, ...] = Field(
        default=(), max_length=16, description="More volumes.", json_schema_extra=map_by("name")
    )
    volume_mounts: tuple[VolumeMount, ...] = Field(
        default=(),
        max_length=16,
        description="Where all containers of the pod see them.",
        json_schema_extra=map_by("mountPath"),
    )
    priority_class_name: ObjectName | None = Field(default=None, description="Priority class of the pods.")
    runtime_class_name: ObjectName | None = Field(default=None, description="Runtime class of the pods.")

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        demand_different("names of env", (entry.name for entry in self.env))
        demand_different("names of volumes", (volume.name for volume in self.volumes))
        demand_different("mountPath of volumeMounts", (mount.mount_path for mount in self.volume_mounts))
        return self

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "volumeMounts must name volumes of this pod",
            "self.volumeMounts.all(m, self.volumes.exists(v, v.name == m.name))",
            lambda pod: not {mount.name for mount in pod.volume_mounts} <= {volume.name for volume in pod.volumes},
        ),
    )
