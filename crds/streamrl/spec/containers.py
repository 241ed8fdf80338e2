"""What stands in a container, spelled as in a Pod: amounts, environment, and the containers that a job adds of its own.

Owns shape, bounds and what is refused of them. Of added containers only that is typed; the rest goes to the API server as it is.
"""

from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from streamrl import names
from streamrl.spec.base import NAME_PATTERN, FieldRule, OneOf, Piece, SpecModel, map_by
from streamrl.spec.core_v1 import IdNumber
from streamrl.spec.volumes import ObjectName, Quantity, Word

OWN_PREFIX = "STREAMRL_"
"""Environment variables that the operator sets."""


class Resources(SpecModel):
    """Requests and limits."""

    requests: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Amounts that the scheduler of the cluster reserves."
    )
    limits: dict[str, Quantity] = Field(
        default_factory=dict, max_length=16, description="Amounts that it may not exceed; GPUs stand here."
    )


class ClaimUse(SpecModel):
    """A device of a resource claim."""

    name: Word = Field(description="Name in resourceClaims of the pod.")
    request: Word | None = Field(default=None, description="One request of the claim; absent = all of it.")


class MainResources(Resources):
    """Requests, limits and devices."""

    claims: tuple[ClaimUse, ...] = Field(
        default=(), max_length=8, description="Devices of resourceClaims (DRA).", json_schema_extra=map_by("name")
    )


class KeyRef(SpecModel):
    """One key of an object in the job's namespace."""

    name: ObjectName = Field(description="Name of the object.")
    key: Word = Field(description="Key in it.")
    optional: bool = Field(default=False, description="Without it the pod starts all the same.")


class EnvSource(OneOf):
    """Where a variable's value comes from."""

    secret_key_ref: KeyRef | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeyRef | None = Field(default=None, description="A key of a ConfigMap.")
    field_ref: Piece | None = Field(default=None, description="Such as fieldPath status.podIP.")
    resource_field_ref: Piece | None = Field(default=None, description="Such as resource limits.memory.")


class EnvVar(SpecModel):
    """An environment variable."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=128)] = Field(
        description="Name; those that begin with STREAMRL_ are the operator's."
    )
    value: str | None = Field(default=None, max_length=4096, description="Its value.")
    value_from: EnvSource | None = Field(default=None, description="Or where it comes from.")

    refused: ClassVar[Mapping[str, str]] = {
        "secretKey": "a Secret is named as in a Pod; use valueFrom: {secretKeyRef: {name: ..., key: ...}}"
    }
    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "needs exactly one of value, valueFrom",
            "has(self.value) != has(self.valueFrom)",
        ),
        FieldRule(
            "name must not begin with STREAMRL_: the operator sets those",
            f"!self.name.startsWith('{OWN_PREFIX}')",
        ),
    )


class ObjectRef(SpecModel):
    """An object in the job's namespace."""

    name: ObjectName = Field(description="Its name.")
    optional: bool = Field(default=False, description="Without it the pod starts all the same.")


class EnvFrom(OneOf):
    """Every key of an object as an environment variable."""

    one_of: ClassVar[tuple[str, ...]] = ("secret_ref", "config_map_ref")

    prefix: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)] | None = Field(
        default=None, description="Put before each key."
    )
    secret_ref: ObjectRef | None = Field(default=None, description="A Secret.")
    config_map_ref: ObjectRef | None = Field(default=None, description="A ConfigMap.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "prefix must not begin with STREAMRL_, or be the beginning of it: the operator sets those",
            f"!has(self.prefix) || !(self.prefix.startsWith('{OWN_PREFIX}') || '{OWN_PREFIX}'.startsWith(self.prefix))",
        ),
    )


class Capabilities(SpecModel):
    """Linux capabilities."""

    drop: tuple[Word, ...] = Field(default=(), max_length=64, description="ALL is dropped anyway.")

    refused: ClassVar[Mapping[str, str]] = {
        "add": "the pods run under Pod Security 'restricted', without capabilities; use an image that needs none"
    }


class ContainerSecurity(SpecModel):
    """What Pod Security "restricted" lets an added container choose; the rest is put over it."""

    run_as_user: IdNumber | None = Field(default=None, description="Absent = the pod's.")
    run_as_group: IdNumber | None = Field(default=None, description="Absent = the pod's.")
    read_only_root_filesystem: bool | None = Field(default=None, description="As in a Pod.")
    run_as_non_root: bool | None = Field(default=None, description="True.")
    privileged: bool | None = Field(default=None, description="False.")
    allow_privilege_escalation: bool | None = Field(default=None, description="False.")
    capabilities: Capabilities | None = Field(default=None, description="As in a Pod.")
    seccomp_profile: Piece | None = Field(default=None, description="RuntimeDefault is put over it.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "privileged and allowPrivilegeEscalation must be false: a pod must not rule its node; "
            "for devices use resources or resourceClaims, for mounts a csi volume",
            "!(has(self.privileged) && self.privileged || "
            "has(self.allowPrivilegeEscalation) && self.allowPrivilegeEscalation)",
        ),
        FieldRule(
            "runAsNonRoot must be true: the pods run under Pod Security 'restricted'; use an image that needs no root",
            "!has(self.runAsNonRoot) || self.runAsNonRoot",
        ),
    )


class ExtraMount(SpecModel):
    """As in a Pod."""

    model_config = ConfigDict(extra="allow")

    name: Word = Field(description="Name of the volume.")


class ExtraPort(SpecModel):
    """As in a Pod."""

    model_config = ConfigDict(extra="allow")

    host_port: int = Field(default=0, ge=0, le=65_535, description="0.")

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "hostPort must be 0: a pod must not take its node's ports; use a Service",
            "!has(self.hostPort) || self.hostPort == 0",
            "{self.host_port}",
        ),
    )


_HANDLERS = ("livenessProbe", "readinessProbe", "startupProbe", "postStart", "preStop")
"""What the kubelet asks over the network in a container's name."""


def _mapping(piece: Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    """Return the mapping at `key` of a piece that is as its writer left it; without one an empty mapping."""
    found = (piece or {}).get(key)
    return found if isinstance(found, Mapping) else {}


class ExtraContainer(SpecModel):
    """A container as in a Pod: image, command, args, env, resources, probes and the like."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, StringConstraints(pattern=NAME_PATTERN, min_length=1, max_length=63)] = Field(
        description="Its name; prepare, tasks, scheduler, trainer and generator are the operator's."
    )
    image: Annotated[str, StringConstraints(min_length=1, max_length=512)] = Field(description="Its image.")
    volume_mounts: tuple[ExtraMount, ...] = Field(
        default=(), max_length=16, description="Where it sees volumes of this pod."
    )
    ports: tuple[ExtraPort, ...] = Field(default=(), max_length=16, description="Its ports.")
    security_context: ContainerSecurity | None = Field(default=None, description="As far as it may choose.")

    @model_validator(mode="after")
    def _probes_stay_in_the_pod(self) -> Self:
        """Check what an API server cannot: its rules do not see into free-form pieces."""
        pieces = {**(self.model_extra or {}), **_mapping(self.model_extra, "lifecycle")}
        for name, way in product(_HANDLERS, ("httpGet", "tcpSocket")):
            if host := _mapping(_mapping(pieces, name), way).get("host"):
                raise ValueError(f"host of {name}.{way} must be absent: Pod Security 'restricted', got {host}")
        return self

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "name must not be that of a container of ours: set image, env, resources and the like in pod itself",
            f"!(self.name in {list(names.OWN_CONTAINERS)})",
            "{self.name}",
        ),
    )
