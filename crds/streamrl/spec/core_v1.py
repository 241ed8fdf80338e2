"""Pieces of core/v1 that go into a pod as the job has them: the allow-list. One more field is one line here.

Owns which fields of which type a job may write, and their bounds. A field of `PodFields` reaches the pods without any other line.
Each class is named after the API's type, and a test holds its fields against the API's own schema (`tests/unit/contract/test_core_v1.py`).
Does not own pieces with rules: resources, volumes, environment, containers.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue, StringConstraints

from streamrl.spec.base import OneOf, Piece, SpecModel, Text, map_by
from streamrl.spec.volumes import LabelValue, ObjectName, Word

IdNumber = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""Number of a user or group; root has 0."""
_Short = Annotated[str, StringConstraints(max_length=253)]


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


class PodDNSConfigOption(SpecModel):
    """An option of resolv.conf."""

    name: Word = Field(description="Such as ndots.")
    value: _Short | None = Field(default=None, description="Its value.")


class PodDNSConfig(SpecModel):
    """How names are looked up, beside the cluster's DNS."""

    nameservers: tuple[_Short, ...] = Field(default=(), max_length=3, description="More name servers.")
    searches: tuple[_Short, ...] = Field(default=(), max_length=32, description="More search domains.")
    options: tuple[PodDNSConfigOption, ...] = Field(default=(), max_length=16, description="Options of resolv.conf.")


class HostAlias(SpecModel):
    """A line of the pod's hosts file."""

    ip: _Short = Field(min_length=1, description="Address.")
    hostnames: tuple[Word, ...] = Field(default=(), max_length=16, description="Names of it.")


class ExecAction(SpecModel):
    """A command in the container."""

    command: tuple[Text, ...] = Field(
        min_length=1, max_length=16, description="Program and arguments, without a shell."
    )


class HTTPGetAction(SpecModel):
    """A GET to the pod."""

    path: Annotated[str, StringConstraints(max_length=1024)] | None = Field(default=None, description="Absent = /.")
    port: int = Field(ge=1, le=65_535, description="Number of the port.")
    scheme: Literal["HTTP", "HTTPS"] | None = Field(default=None, description="Absent = HTTP.")

    refused: ClassVar[Mapping[str, str]] = {"host": "the kubelet asks the pod and no other address; use exec for one"}


class SleepAction(SpecModel):
    """A pause."""

    seconds: int = Field(ge=0, le=86_400, description="Its length; the grace period goes on.")


class LifecycleHandler(OneOf):
    """One action."""

    exec: ExecAction | None = Field(default=None, description="A command in the container.")
    http_get: HTTPGetAction | None = Field(default=None, description="A GET to the pod.")
    sleep: SleepAction | None = Field(default=None, description="A pause.")


class Lifecycle(SpecModel):
    """What the kubelet does in the main container after its start and before SIGTERM."""

    post_start: LifecycleHandler | None = Field(default=None, description="After the start.")
    pre_stop: LifecycleHandler | None = Field(default=None, description="Before SIGTERM, within the grace period.")


class PodSecurityContext(SpecModel):
    """Users and groups of all containers that choose none."""

    run_as_user: IdNumber | None = Field(default=None, description="Absent = 10001, or the cluster's choice.")
    run_as_group: IdNumber | None = Field(default=None, description="Absent = 10001, or the cluster's choice.")
    fs_group: IdNumber | None = Field(
        default=None, description="Group of volumes; absent = 10001, or the cluster's choice."
    )
    supplemental_groups: tuple[IdNumber, ...] = Field(default=(), max_length=16, description="More groups.")


class PodFields(SpecModel):
    """Fields of a Pod's specification that reach the pods as they are written."""

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
    topology_spread_constraints: tuple[Piece, ...] = Field(
        default=(), max_length=8, description="As in a Pod; labelSelector absent = these pods."
    )
    dns_config: PodDNSConfig | None = Field(default=None, description="How names are looked up.")
    host_aliases: tuple[HostAlias, ...] = Field(
        default=(), max_length=16, description="Lines of the hosts file.", json_schema_extra=map_by("ip")
    )
    priority_class_name: ObjectName | None = Field(default=None, description="Priority class of the pods.")
    runtime_class_name: ObjectName | None = Field(default=None, description="Runtime class of the pods.")
    scheduler_name: ObjectName | None = Field(default=None, description="Who places the pods; absent = the cluster's.")


PodField = Literal[
    "nodeSelector",
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "dnsConfig",
    "hostAliases",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
]
"""Fields of `PodFields`, for what enforces them."""
