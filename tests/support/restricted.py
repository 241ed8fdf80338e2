"""Pod Security "restricted" (and the parts of "baseline" that it includes), rule by rule, as Kubernetes 1.34 checks a pod.

After https://kubernetes.io/docs/concepts/security/pod-security-standards/; the cluster tests ask a real API server.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SECCOMP = ("RuntimeDefault", "Localhost")


def violations(spec: Mapping[str, Any]) -> list[str]:
    """What the standard has against a pod's specification."""
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC", "hostUsers") if spec.get(key)]
    for volume in spec.get("volumes", ()):
        found += [f"volume {volume['name']}: {kind}" for kind in set(volume) - {"name"} - _VOLUMES]
    pod = spec.get("securityContext", {})
    for container in [*spec.get("initContainers", ()), *spec["containers"]]:
        found += [f"{container['name']}: {rule}" for rule in _container(container, pod=pod)]
    return found


def _container(container: Mapping[str, Any], *, pod: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation must be false"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot must be true"
    if own.get("runAsUser", pod.get("runAsUser")) == 0:
        yield "runAsUser must not be 0"
    if "ALL" not in own.get("capabilities", {}).get("drop", ()):
        yield "capabilities.drop must have ALL"
    if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in _SECCOMP:
        yield "seccompProfile"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"
