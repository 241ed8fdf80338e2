"""The parts that all containers have: command, ports, probes, security, mounts.

What Pod Security "restricted" asks for stands here and in `template`; a job cannot change it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamrl.spec.pod import Pod, VolumeMount
from streamrl_operator.planning.objects.environment import Variables, merged
from streamrl_operator.planning.objects.meta import Built

_PROTECTED_DIRS = ("/etc/streamrl/", "/var/lib/streamrl/")

ALIVE, READY = "/numbers", "/healthz"
"""Pages of the signals port. /numbers answers as long as the process does; /healthz also says no while it loads or waits
for another process, and nobody is helped by killing one that waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """How it is seen that a container works."""

    port: int
    start_deadline_s: int
    starts_ready: bool = False
    """It has started only when it is ready: what comes after it in the pod waits for that."""


_START_PERIOD_S = 2
_READY_PERIOD_S = 5
_ALIVE_PERIOD_S, _ALIVE_FAILURES = 20, 15
"""Five minutes without an answer: a process that computes answers late, and a restart costs more than the wait."""
_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One of our containers before the job's changes."""

    name: str
    module: str
    """Run by `python -m`."""
    arguments: Sequence[str] = ()
    variables: Variables
    mounts: Mapping[str, str]
    """Directory -> volume."""
    read_only: Sequence[str] = ()
    """Volumes that it only reads."""
    ports: Mapping[str, int] = field(default_factory=dict)
    probes: Probes | None = None
    requests: Mapping[str, str] | None = None
    """None: the job's own resources."""
    sidecar: bool = False


def build(container: Container, *, image: str, pod: Pod) -> Built:
    """The container with the job's changes merged in."""
    built: Built = {
        "name": container.name,
        "image": image,
        "imagePullPolicy": pod.image_pull_policy,
        "command": ["python", "-m", container.module, *container.arguments],
        "env": merged(container.variables, pod.env),
        "resources": _resources(container, pod=pod),
        "volumeMounts": _mounts(container, given=pod.volume_mounts),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if container.sidecar:
        built["restartPolicy"] = "Always"
    if container.ports:
        built["ports"] = [
            {"name": name, "containerPort": port, "protocol": "TCP"} for name, port in container.ports.items()
        ]
    return built | (_probes(container.probes) if container.probes else {})


def _resources(container: Container, *, pod: Pod) -> Built:
    if container.requests is not None:
        return {"requests": dict(container.requests)}
    return pod.resources.model_dump(mode="json", exclude_defaults=True)


def _mounts(container: Container, *, given: Sequence[VolumeMount]) -> list[Built]:
    """Ours and the job's; the job may put a volume of its own in the place of scratch space, not of the rest."""
    theirs = {mount.mount_path.rstrip("/") or "/": _given_mount(mount) for mount in given}
    ours = {path: _own_mount(container, path=path, volume=volume) for path, volume in container.mounts.items()}
    protected = {path: mount for path, mount in ours.items() if f"{path}/".startswith(_PROTECTED_DIRS)}
    return list((ours | theirs | protected).values())


def _own_mount(container: Container, *, path: str, volume: str) -> Built:
    mount = {"name": volume, "mountPath": path}
    return mount | {"readOnly": True} if volume in container.read_only else mount


def _given_mount(mount: VolumeMount) -> Built:
    built: Built = mount.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return built


def _probes(probes: Probes) -> Built:
    return {
        "startupProbe": _probe(READY if probes.starts_ready else ALIVE, port=probes.port)
        | {"periodSeconds": _START_PERIOD_S, "failureThreshold": probes.start_deadline_s // _START_PERIOD_S},
        "livenessProbe": _probe(ALIVE, port=probes.port)
        | {"periodSeconds": _ALIVE_PERIOD_S, "failureThreshold": _ALIVE_FAILURES},
        "readinessProbe": _probe(READY, port=probes.port) | {"periodSeconds": _READY_PERIOD_S},
    }


def _probe(path: str, *, port: int) -> Built:
    return {"httpGet": {"path": path, "port": port}, "timeoutSeconds": _TIMEOUT_S}
