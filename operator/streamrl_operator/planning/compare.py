"""Whether an object must be applied: compare first, since a server-side apply that changes nothing costs the API server 7 ms.

Our fields must all be there with our values, so that what somebody changed by hand is put right. What is there besides
is not ours: defaults of the API server, fields of other managers. That we no longer set a field shows in the annotation
with the hash of what we apply, which is one of our fields.
"""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

_KEYS: Mapping[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "resourceClaims": ("name",),
    "claims": ("name",),
    "imagePullSecrets": ("name",),
    "volumeMounts": ("mountPath",),
    "ownerReferences": ("uid",),
}
"""Lists that server-side apply merges, by what tells their items apart. The others are replaced as a whole."""
_PORT_KEYS = ("containerPort", "port", "protocol")
"""Ports of a container and of a Service are merged by number and protocol; those of a NetworkPolicy are few and in order."""
_NUMBER_OR_TEXT = frozenset({"port", "targetPort", "maxUnavailable", "minAvailable"})
_QUANTITIES = frozenset({"requests", "limits"})

_QUANTITY = re.compile(r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]+))?$")
_FACTORS = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{suffix: Fraction(1000**power) for power, suffix in enumerate(("k", "M", "G", "T", "P", "E"), start=1)},
    **{suffix: Fraction(1024**power) for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), start=1)},
}

Path = tuple[str, ...]


def differs(desired: Mapping[str, Any], observed: Mapping[str, Any] | None) -> bool:
    """Whether `desired` must be applied to what the API server has."""
    if observed is None:
        return True
    return not _holds(desired, observed, path=("",))


def with_claim_kept(desired: Mapping[str, Any], observed: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """`desired` with what an observed claim can no longer change: its class, whatever defaults say now, and a size that somebody has enlarged."""
    if observed is None or desired.get("kind") != "PersistentVolumeClaim":
        return desired
    kept, there = {}, _storage(observed)
    ours, theirs = parse_quantity(_storage(desired) or ""), parse_quantity(there or "")
    if ours is not None and theirs is not None and ours < theirs:
        kept["resources"] = {"requests": {"storage": there}}
    if "storageClassName" in observed["spec"]:
        kept["storageClassName"] = observed["spec"]["storageClassName"]
    return {**desired, "spec": {**desired["spec"], **kept}}


def _storage(obj: Mapping[str, Any]) -> str | None:
    if obj.get("kind") != "PersistentVolumeClaim":
        return None
    found: str | None = obj["spec"].get("resources", {}).get("requests", {}).get("storage")
    return found


def parse_quantity(text: str) -> Fraction | None:
    """The number that a Kubernetes quantity is; None if it is none."""
    match = _QUANTITY.match(text)
    if match is None:
        return None
    digits, suffix, exponent = match.groups()
    return Fraction(digits) * _FACTORS.get(suffix or "", Fraction(1)) * Fraction(10) ** int(exponent or 0)


def _holds(desired: object, observed: object, *, path: Path) -> bool:
    """Whether everything that `desired` says is so in `observed`."""
    if desired == observed:
        return True  # most parts are as they were, and this is quick
    if observed is None:
        return _is_nothing(desired)
    if isinstance(desired, Mapping):
        if not isinstance(observed, Mapping):
            return False
        for key, value in desired.items():
            there = observed.get(key)
            if value is not there and value != there and not _holds(value, there, path=(*path, key)):
                return False
        return True
    if _is_list(desired):
        return _is_list(observed) and _list_holds(desired, observed, path=path)
    return _same(desired, observed, path=path)


def _is_nothing(desired: object) -> bool:
    """What the API server leaves out when it stores it. False and 0 are kept where we set them."""
    if isinstance(desired, Mapping):
        return all(_is_nothing(value) for value in desired.values())
    return desired is None or desired == "" or (_is_list(desired) and not desired)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _list_holds(desired: Any, observed: Any, *, path: Path) -> bool:  # noqa: ANN401 - lists of plain data
    keys = _merge_keys(desired, path=path)
    if not keys:
        return len(desired) == len(observed) and all(
            _holds(ours, theirs, path=path) for ours, theirs in zip(desired, observed, strict=True)
        )
    there = {_identity(item, keys): item for item in observed if isinstance(item, Mapping)}
    return all(_holds(item, there.get(_identity(item, keys)), path=path) for item in desired)


def _merge_keys(desired: Sequence[Any], *, path: Path) -> tuple[str, ...]:
    if not all(isinstance(item, Mapping) for item in desired):
        return ()
    if path[-1] == "ports":
        return () if {"ingress", "egress"} & set(path) else _PORT_KEYS
    return _KEYS.get(path[-1], ())


def _identity(item: Mapping[str, Any], keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(item.get(key, "TCP" if key == "protocol" else "")) for key in keys)


def _same(desired: object, observed: object, *, path: Path) -> bool:
    """Whether two scalars mean the same at this place."""
    if path[-1] in _NUMBER_OR_TEXT:
        return str(desired) == str(observed)
    if _is_quantity(path):
        ours, theirs = parse_quantity(str(desired)), parse_quantity(str(observed))
        if ours is not None and theirs is not None:
            return ours == theirs
    return False


def _is_quantity(path: Path) -> bool:
    return path[-1] in ("sizeLimit", "divisor") or path[-3:-1] in {("resources", kind) for kind in _QUANTITIES}
