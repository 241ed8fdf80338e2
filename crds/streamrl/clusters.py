"""RLCluster: a member cluster that pools of jobs may lie in. One document for each, written by an administrator."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from streamrl.spec.base import MOST_CLUSTER_CHARACTERS, ClusterName, FieldRule, OneOf, SpecModel, map_by

ObjectName = Annotated[
    str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", min_length=1, max_length=253)
]
Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
Host = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9._-]+|[0-9A-Fa-f:]+)$", min_length=1, max_length=253)]


class ClusterProfileSource(SpecModel):
    """A ClusterProfile (multicluster.x-k8s.io/v1alpha1) of the home cluster, and a Secret of yours with the token. No plug-in is started."""

    name: ObjectName = Field(description="Name of the ClusterProfile.")
    namespace: Namespace = Field(description="Its namespace.")
    provider: Annotated[str, StringConstraints(min_length=1, max_length=253)] = Field(
        default="secretreader",
        description="Entry of its `status.accessProviders` (or `credentialProviders`) that says server and certificate authority.",
    )
    token_secret_name: ObjectName = Field(
        description="Secret in the operator's namespace with the key `token`. It is sent to the server that the profile says."
    )


class ClusterSource(OneOf):
    """How the operator reaches the member's API server, and who it is there."""

    kubeconfig_secret_name: ObjectName | None = Field(
        default=None,
        description="Secret in the operator's namespace with the key `kubeconfig`. That may start no programs, read no files, "
        "use no proxy, and must verify TLS.",
    )
    cluster_profile: ClusterProfileSource | None = Field(
        default=None, description="Server and certificate authority by a ClusterProfile, the token by a Secret."
    )


class NamespaceMapping(SpecModel):
    """A namespace at home, and the one in the member where pools of its jobs are made."""

    hub: Namespace = Field(description="Namespace of the jobs.")
    member: Namespace = Field(description="Namespace in the member, for this hub namespace alone.")

    @classmethod
    def all_cel_rules(cls) -> tuple[tuple[str, str], ...]:
        """Jobs that are there would be lost from sight."""
        message = "member cannot be changed: take the entry out, and add it again when no job of the namespace is there"
        return (*super().all_cel_rules(), ("self.member == oldSelf.member", message))


class AddressExposure(SpecModel):
    """An address that leads to the schedulers of all jobs: a proxy that chooses by SNI, or forwarded ports of one job."""

    host: Host = Field(description="Name or address, as the generators see it.")
    scheduler_port: int = Field(default=443, ge=1, le=65_535, description="Leads to the scheduler's port `grpc`.")
    weights_port: int = Field(default=443, ge=1, le=65_535, description="Leads to the trainer's port `weights`.")


class NodePortExposure(SpecModel):
    """A Service of type NodePort for each job."""

    host: Host = Field(
        description="Address of a node beside the scheduler, or of what leads to its nodes, as the generators see it."
    )


class LoadBalancerExposure(SpecModel):
    """A Service of type LoadBalancer for each job."""

    annotations: dict[str, Annotated[str, StringConstraints(max_length=1024)]] = Field(
        default_factory=dict, max_length=32, description="Of the Service, as the cluster's provider reads them."
    )


class GatewayExposure(SpecModel):
    """A Gateway at home that passes TLS through by SNI: two TLSRoutes for each job."""

    name: ObjectName = Field(
        description="Name of the Gateway. Its listener has `tls.mode: Passthrough` and lets in routes of the jobs' namespaces."
    )
    namespace: Namespace = Field(description="Its namespace.")
    section_name: ObjectName | None = Field(
        default=None, description="Its listener; absent = any that takes the routes."
    )
    host: Host = Field(description="Name or address of the Gateway, as generators in the member see it.")
    port: int = Field(default=443, ge=1, le=65_535, description="Of the listener.")


class Exposure(OneOf):
    """How generators of other clusters reach schedulers. Certificates are asked on every way."""

    address: AddressExposure | None = Field(default=None, description="Given by you.")
    node_port: NodePortExposure | None = Field(default=None, description="By ports of the nodes beside the scheduler.")
    load_balancer: LoadBalancerExposure | None = Field(
        default=None, description="By a load balancer beside the scheduler."
    )
    gateway: GatewayExposure | None = Field(default=None, description="By a Gateway at home, which all jobs share.")


class Trainers(SpecModel):
    """Trainers in the member: their schedulers, volumes and rewards are there too."""

    exposure: Exposure | None = Field(
        default=None,
        description="How generators in other clusters reach schedulers in the member; absent = only jobs with all pools there have their trainer there.",
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "exposure must not be gateway: the operator makes no routes in a member; give the Gateway's address",
            "!has(self.exposure) || !has(self.exposure.gateway)",
        ),
    )


class RLClusterSpec(SpecModel):
    """A member cluster."""

    source: ClusterSource = Field(description="How it is reached.")
    namespaces: tuple[NamespaceMapping, ...] = Field(
        description="Whose jobs may have pools there, and where.",
        min_length=1,
        max_length=64,
        json_schema_extra=map_by("hub"),
    )
    exposure: Exposure = Field(description="How generators there reach schedulers at home.")
    trainers: Trainers | None = Field(
        default=None,
        description="That jobs may have their trainer there (`trainer.clusterName`); absent = they may not.",
    )
    allowed_secrets: tuple[ObjectName, ...] = Field(
        default=(),
        max_length=64,
        description="Secrets in the member that pods of pools may name; the operator copies none.",
    )
    allowed_claims: tuple[ObjectName, ...] = Field(
        default=(), max_length=64, description="PersistentVolumeClaims in the member that pods of pools may mount."
    )

    field_rules: ClassVar[tuple[FieldRule, ...]] = (
        FieldRule(
            "namespaces must name each member namespace once: two teams' jobs may have the same name",
            "self.namespaces.all(n, self.namespaces.exists_one(o, o.member == n.member))",
            "{n.member}",
        ),
    )

    def namespace_of(self, hub: str) -> str | None:
        """In the member; None: jobs of that hub namespace have no place there."""
        return next((one.member for one in self.namespaces if one.hub == hub), None)


class ClusterMetadata(SpecModel):
    """Name of the member."""

    name: ClusterName = Field(
        description=f"As `clusterName` of pools gives it, at most {MOST_CLUSTER_CHARACTERS} characters."
    )
    labels: dict[str, str] | None = Field(default=None, description="Labels.")
    annotations: dict[str, str] | None = Field(default=None, description="Annotations.")


class RLCluster(SpecModel):
    """A member cluster, in which pools of RLJobs may have their pods."""

    api_version: Literal["streamrl.io/v1alpha1"] = Field(description="streamrl.io/v1alpha1")
    kind: Literal["RLCluster"] = Field(description="RLCluster")
    metadata: ClusterMetadata = Field(description="Name of the member.")
    spec: RLClusterSpec = Field(description="How the member is reached, and who may use it.")
