"""What the pods of a job ask of their namespace: objects that they name, and a share of its quotas. Pure."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from streamrl_operator.planning.compare import parse_quantity
from streamrl_operator.planning.values import Object

_PREFIXES = {"requests.": "requests", "limits.": "limits"}
_PODS = ("pods", "count/pods")
_BARE = ("cpu", "memory", "ephemeral-storage")
"""Resources of a quota that mean requests without saying so."""


def named_objects(spec: Object) -> set[tuple[str, str]]:
    """(kind, name) of the ConfigMaps, Secrets and claims without which a pod of this spec does not start."""
    found = set(_of_volumes(spec.get("volumes") or ()))
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        found |= set(_of_environment(container))
    return found


def _of_volumes(volumes: Sequence[Object]) -> Iterator[tuple[str, str]]:
    for volume in volumes:
        yield from _source(volume, secret_key="secretName")  # noqa: S106 - name of a field
        for part in (volume.get("projected") or {}).get("sources") or ():
            yield from _source(part, secret_key="name")  # noqa: S106
        if claim := (volume.get("persistentVolumeClaim") or {}).get("claimName"):
            yield "PersistentVolumeClaim", str(claim)


def _source(source: Object, *, secret_key: str) -> Iterator[tuple[str, str]]:
    for field, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", secret_key)):
        yield from _required(source.get(field), kind=kind, key=key)


def _of_environment(container: Object) -> Iterator[tuple[str, str]]:
    for one in container.get("env") or ():
        given = one.get("valueFrom") or {}
        yield from _required(given.get("configMapKeyRef"), kind="ConfigMap")
        yield from _required(given.get("secretKeyRef"), kind="Secret")
    for one in container.get("envFrom") or ():
        yield from _required(one.get("configMapRef"), kind="ConfigMap")
        yield from _required(one.get("secretRef"), kind="Secret")


def _required(reference: Any, *, kind: str, key: str = "name") -> Iterator[tuple[str, str]]:  # noqa: ANN401 - plain data
    if reference and not reference.get("optional") and reference.get(key):
        yield kind, str(reference[key])


def quota_lack(quotas: Sequence[Object], pods: Sequence[tuple[int, Object]]) -> str:
    """Return the first resource of which all pods together ask for more than a quota has left; empty: there is room.

    `pods`: (how many, their spec as it is admitted). Quotas with scopes count some pods alone: the API server judges each.
    """
    for quota in quotas:
        spec, status = quota.get("spec") or {}, quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        for resource, bound in hard.items():
            asked = sum((count * _asked(one, resource) for count, one in pods), Fraction(0))
            left = _number(bound) - _number(used.get(resource))
            if asked > max(left, Fraction(0)):
                name = quota["metadata"]["name"]
                return f"ResourceQuota {name}: {resource}: the job asks for {_text(asked)}, left are {_text(left)} of {bound}"
    return ""


def _asked(spec: Object, resource: str) -> Fraction:
    """Return what one pod asks for of a quota's resource."""
    if resource in _PODS:
        return Fraction(1)
    prefix = next((each for each in _PREFIXES if resource.startswith(each)), "")
    if not prefix and resource not in _BARE:
        return Fraction(0)
    field, name = _PREFIXES.get(prefix, "requests"), resource.removeprefix(prefix)

    def of(part: Object) -> Fraction:
        resources = part.get("resources") or {}
        # A device has one amount: the API server takes a limit for the request as well.
        given = (resources.get(field) or {}).get(name, (resources.get("limits") or {}).get(name))
        return _number(given)

    beside, most = Fraction(0), Fraction(0)
    for one in spec.get("initContainers") or ():
        if one.get("restartPolicy") == "Always":
            beside += of(one)
        else:
            most = max(most, beside + of(one))
    running = beside + sum((of(one) for one in spec["containers"]), Fraction(0))
    return max(most, running) + _number((spec.get("overhead") or {}).get(name))


def _number(quantity: object) -> Fraction:
    return parse_quantity(str(quantity)) or Fraction(0) if quantity is not None else Fraction(0)


def _text(number: Fraction) -> str:
    return f"{float(number):g}"
