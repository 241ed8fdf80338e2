"""Volumes of a pod, spelled as in a Pod: the kinds that Pod Security "restricted" allows, where containers see them, and the cache on one.

Owns shape, bounds and what is refused. Large kinds go to the API server as they are.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from streamrl.spec.base import NAME_PATTERN, ByteQuantity, FieldRule, OneOf, Piece, SpecModel

OBJECT_PATTERN = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ObjectName = Annotated[str, StringConstraints(pattern=OBJECT_PATTERN, min_length=1, max_length=253)]
"""Name of an object in the job's namespace."""
Word = Annotated[str, StringConstraints(min_length=1, max_length=253)]
LABEL_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LabelValue = Annotated[str, StringConstraints(pattern=LABEL_PATTERN, max_length=63)]
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"


def _digits(value: object) -> object:
    """A whole number as text; all else as it is."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


Quantity = Annotated[
    str,
    StringConstraints(pattern=QUANTITY_PATTERN, max_length=20),
    BeforeValidator(_digits),
    Field(json_schema_extra={"x-kubernetes-int-or-string": True}),
]
"""An amount as Kubernetes writes it: `1`, `500m`, `8Gi`. A whole number is read as its digits."""


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

OWN_DIRS = ("/etc/streamrl/", "/var/lib/streamrl/")
"""Directories in which the operator mounts: job, certificates, code, run, checkpoints."""
FileMode = Annotated[int, Field(ge=0, le=0o777)]
"""Of files; YAML reads 0o400, JSON 256."""


class ClaimVolume(SpecModel):
    """A persistent volume claim."""

    claim_name: ObjectName = Field(description="Name of the claim.")
    read_only: bool = Field(default=False, description="Mounted for reading only.")


class KeysVolume(SpecModel):
    """Keys of an object as files."""

    items: tuple[Piece, ...] = Field(default=(), max_length=64, description="Keys and their files; absent = all.")
    default_mode: FileMode | None = Field(default=None, description="Mode of the files; absent = 420 (0644).")
    optional: bool = Field(default=False, description="Without it the pod starts all the same.")


class ConfigMapVolume(KeysVolume):
    """A ConfigMap as files."""

    name: ObjectName = Field(description="Name of the ConfigMap.")


class SecretVolume(KeysVolume):
    """A Secret as files."""

    secret_name: ObjectName = Field(description="Name of the Secret.")


class EmptyDirVolume(SpecModel):
    """Scratch space that ends with the pod."""

    medium: Literal["", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"] = Field(
        default="", description="Memory, as /dev/shm needs it, or huge pages of resources."
    )
    size_limit: Quantity | None = Field(default=None, description="At most so much.")


class Volume(OneOf):
    """A volume of the pod."""

    one_of: ClassVar[tuple[str, ...]] = (
        "persistent_volume_claim",
        "config_map",
        "secret",
        "empty_dir",
        "projected",
        "csi",
        "ephemeral",
        "downward_api",
    )

    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=63)] = Field(
        description="Name of the volume; those that begin with streamrl- are the operator's."
    )
    persistent_volume_claim: ClaimVolume | None = Field(default=None, description="A persistent volume claim.")
    config_map: ConfigMapVolume | None = Field(default=None, description="A ConfigMap as files.")
    secret: SecretVolume | None = Field(default=None, description="A Secret as files.")
    empty_dir: EmptyDirVolume | None = Field(default=None, description="Scratch space that ends with the pod.")
    projected: Piece | None = Field(default=None, description="Several sources, such as a ServiceAccount's token.")
    csi: Piece | None = Field(default=None, description="Made by a CSI driver for this pod.")
    ephemeral: Piece | None = Field(default=None, description="A claim that is made and ends with the pod.")
    downward_api: Piece | None = Field(default=None, alias="downwardAPI", description="Fields of the pod as files.")

    refused: ClassVar[Mapping[str, str]] = {
        "hostPath": "a pod must not see its node's files; use persistentVolumeClaim, csi or ephemeral",
        "nfs": "Pod Security 'restricted' has no such volume; use persistentVolumeClaim",
    }
    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "name must not begin with streamrl-: the operator makes those",
            "!self.name.startsWith('streamrl-')",
        ),
    )


def _outside_of_ours(key: str) -> FieldRule:
    """The rule that a directory is apart from the operator's. `key`: its field as users write it."""
    return FieldRule(
        f"{key} must not lie in, or hold, /etc/streamrl or /var/lib/streamrl: those are the operator's",
        f"{list(OWN_DIRS)}.all(own, !(self.{key} + '/').startsWith(own) && !own.startsWith(self.{key} + '/'))",
    )


class VolumeMount(SpecModel):
    """Where the containers of the pod see a volume."""

    name: Word = Field(description="Name of the volume.")
    mount_path: AbsolutePath = Field(description="Directory in the container.")
    sub_path: SubPath | None = Field(default=None, description="Directory in the volume; absent = all.")
    read_only: bool = Field(default=False, description="For reading only.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (_outside_of_ours("mountPath"),)


class WeightCacheSpec(SpecModel):
    """A directory in which generators find weights that others have pulled: by the hashes of their bytes, so any job may share it."""

    path: AbsolutePath = Field(
        description="The directory. On Kubernetes within a mountPath of pod.volumeMounts; else space of the node that ends with the pod."
    )
    max_bytes: ByteQuantity = Field(
        description="Bytes in it, two versions of the model at least; tensors that no pull has asked for longest go first."
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (_outside_of_ours("path"),)
