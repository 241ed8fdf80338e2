"""What a job has in a member cluster beside what it would have at home, and by what other clusters reach its scheduler. Pure.

    member                       anchor (ConfigMap, owned by nobody) ◀── owns ── all else that the job has there, claims that stay aside;
                                 copies of leaves (Secrets), and for a trainer of the user's modules (ConfigMap)
    where the trainer is         <job>-exposed, a Service, or at home two TLSRoutes, as the exposures of the other clusters need it

The anchor's UID is the owner of all the rest, so deleting it leaves nothing. No owner reference leads from one cluster to another.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from streamrl import keys, names
from streamrl.clusters import Exposure
from streamrl_operator.planning.objects.shared import Built, JobPlan, annotated, service
from streamrl_operator.planning.pods import ROLE_TRAINER
from streamrl_operator.planning.values import ExposedAddresses, Object

_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:]{2,45}\]|[A-Za-z0-9._-]{1,253}):([1-9][0-9]{0,4})")
_LAST_PORT = 65_535


def anchor(plan: JobPlan) -> Built:
    """The owner of all that the job has in the member; made first, deleted last."""
    return plan.object("v1", "ConfigMap", names.anchor(plan.name))


def copies(plan: JobPlan) -> list[Built]:
    """What pods in a member need of what is at home."""
    if plan.place is None:
        return []
    leaves, code = plan.place.leaves.items(), plan.place.code
    kind = "kubernetes.io/tls"
    copied = [
        plan.object("v1", "Secret", names.tls_secret(plan.name, role), type=kind, data=dict(leaf))
        for role, leaf in leaves
    ]
    if plan.has_trainer and code:
        made = plan.object("v1", "ConfigMap", names.code(plan.name))
        copied.append(made | {part: code[part] for part in ("data", "binaryData") if code.get(part)})
    return copied


def owned_by(anchor_uid: str, obj: Object) -> dict[str, Any]:
    """The object, owned by the anchor that its job has in its namespace."""
    metadata = obj["metadata"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": names.anchor(metadata["labels"][names.LABEL_JOB])}
    # It blocks nobody's deletion: that would need a right on finalizers, where the cluster enforces it.
    owners = [owner | {"uid": anchor_uid, "controller": True, "blockOwnerDeletion": False}]
    return {**obj, "metadata": {**metadata, "ownerReferences": owners}}


def exposed_services(plan: JobPlan) -> list[Built]:
    """By which other clusters reach the scheduler: one, of the first cluster that needs one."""
    exposure = next(_serving(plan.exposures), None)
    if exposure is None:
        return []
    ports = {names.PORT_NAME_GRPC: names.PORT_GRPC, names.PORT_NAME_WEIGHTS: names.PORT_WEIGHTS}
    kind = "LoadBalancer" if exposure.load_balancer else "NodePort"
    made = service(
        plan, names.exposed(plan.name), role=ROLE_TRAINER, ports=ports, type=kind, publishNotReadyAddresses=True
    )
    given = exposure.load_balancer.annotations if exposure.load_balancer else {}
    return [_administered(made, given)]


def _administered(made: Object, annotations: Mapping[str, str]) -> Built:
    """Return a way in from other clusters with these annotations alone: load balancers and gateways act on them, so the job's own stay away."""
    metadata = {key: value for key, value in made["metadata"].items() if key != "annotations"}
    return annotated({**made, "metadata": metadata}, annotations)


def _serving(exposures: Mapping[str, Exposure]) -> Iterator[Exposure]:
    """Those that need a Service; a load balancer first, since its Service has node ports too."""
    found = [exposures[name] for name in sorted(exposures)]
    return iter([one for one in found if one.load_balancer] + [one for one in found if one.node_port])


def routes(plan: JobPlan) -> list[Built]:
    """By which Gateways at home pass the job's two names through, where a member dials one."""
    gateways = [one.gateway for _, one in sorted(plan.exposures.items()) if one.gateway is not None]
    parents = {(one.namespace, one.name, one.section_name or ""): one for one in gateways}
    if not parents:
        return []
    refs = [
        {
            "namespace": one.namespace,
            "name": one.name,
            **({"sectionName": one.section_name} if one.section_name else {}),
        }
        for one in parents.values()
    ]
    return [
        _administered(
            plan.object(
                "gateway.networking.k8s.io/v1",
                "TLSRoute",
                f"{plan.name}-{of}",
                spec={
                    "parentRefs": refs,
                    "hostnames": [names.tls_name(of, uid=plan.uid)],
                    "rules": [{"backendRefs": [{"name": names.scheduler(plan.name), "port": port}]}],
                },
            ),
            {},
        )
        for of, port in (("scheduler", names.PORT_GRPC), ("weights", names.PORT_WEIGHTS))
    ]


def dialled(stateful_sets: Iterable[Object]) -> ExposedAddresses | None:
    """Where generators of another cluster dial by what is there: a member may send anything. None: nothing that can be read."""
    for each in stateful_sets:
        try:
            container, *_ = each["spec"]["template"]["spec"]["containers"]  # ours is the first
            found = {one["name"]: str(one.get("value")) for one in container["env"]}
            scheduler = found[keys.ENV_SCHEDULER_ADDRESS]
            weights = found.get(keys.ENV_WEIGHTS_ADDRESS, scheduler)  # with `weights.folder` they dial none
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
        if all(map(_is_address, (scheduler, weights))):
            return ExposedAddresses(scheduler=scheduler, weights=weights)
    return None


def _is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    return found is not None and int(found[1]) <= _LAST_PORT


def addresses(exposure: Exposure, exposed: Object | None) -> ExposedAddresses | None:
    """Where generators of another cluster dial; None: the job's Service is not there, has none yet, or cannot be read: a member may send it."""
    try:
        found = _exposed_addresses(exposure, exposed)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None
    return found if found and _is_address(found.scheduler) and _is_address(found.weights) else None


def _exposed_addresses(exposure: Exposure, exposed: Object | None) -> ExposedAddresses | None:
    if exposure.address is not None:
        host = exposure.address.host
        return _addresses(host, exposure.address.scheduler_port, exposure.address.weights_port)
    if exposure.gateway is not None:
        return _addresses(exposure.gateway.host, exposure.gateway.port, exposure.gateway.port)
    spec, status = (exposed or {}).get("spec") or {}, (exposed or {}).get("status") or {}
    if exposure.node_port is not None:
        ports = {one["name"]: one.get("nodePort") for one in spec.get("ports") or ()}
        scheduler, weights = ports.get(names.PORT_NAME_GRPC), ports.get(names.PORT_NAME_WEIGHTS)
        return _addresses(exposure.node_port.host, scheduler, weights) if scheduler and weights else None
    found = ((status.get("loadBalancer") or {}).get("ingress") or [{}])[0]
    host = found.get("ip") or found.get("hostname")
    return _addresses(host, names.PORT_GRPC, names.PORT_WEIGHTS) if host else None


def _addresses(host: str, scheduler: int, weights: int) -> ExposedAddresses:
    shown = f"[{host}]" if ":" in host else host
    return ExposedAddresses(scheduler=f"{shown}:{scheduler}", weights=f"{shown}:{weights}")
