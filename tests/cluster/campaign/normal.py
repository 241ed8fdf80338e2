"""The picture of a namespace that two runs of the same story must share, and how two pictures differ.

Left out: what an API server or the clock makes (uids, versions, times, addresses, bytes of certificates), statuses that other controllers
write, and `seenFailures`, the operator's memory of pods that came and went. Kept, beyond what the objects say: which fields each of the
operator's field managers holds, whether an observed generation is the present one, and whether each certificate is signed by the job's CA.
"""

import base64
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from cryptography import x509

from cluster.campaign.lab import Objects
from streamrl import names

Picture = dict[str, Any]
"""`kind/name` -> what is left of the object."""

_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)")
_OURS = (names.FIELD_MANAGER, names.REPLICAS_MANAGER)
_WITH_OUR_STATUS = ("rljobs", "generatorpools")
_DROPPED = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "deletionGracePeriodSeconds")
_SHORT_UID = 8
"""Characters that directories are named by (`names.store_dir`)."""
_MOST_SHOWN = 12


def picture(objects: Objects, *, namespace: str) -> Picture:
    """What is left when all that differs by nature is gone."""
    made = {f"{plural}/{name}": _kept(plural, obj, objects) for (plural, name), obj in objects.items()}
    text = json.dumps(made, sort_keys=True).replace(namespace, "NAMESPACE")
    for uid in {*_UID.findall(text), *(obj["metadata"]["uid"] for obj in objects.values())}:
        text = text.replace(f"-{uid[:_SHORT_UID]}", "-SHORT")
    found: Picture = json.loads(_TIME.sub("TIME", _UID.sub("UID", text)))
    return found


def _kept(plural: str, obj: Mapping[str, Any], objects: Objects) -> dict[str, Any]:
    metadata = {key: value for key, value in obj["metadata"].items() if key not in _DROPPED}
    left = {key: value for key, value in obj.items() if key not in ("metadata", "status", "apiVersion", "kind")}
    if plural == "pods":  # the StatefulSet controller's
        return {
            "labels": sorted(key for key in metadata["labels"] if "streamrl.io" in key),
            "leaves": "deletionTimestamp" in metadata,
        }
    if "annotations" in metadata:
        of_hash = {key: "HASH" for key in metadata["annotations"] if key == names.ANNOTATION_SPEC_HASH}
        metadata["annotations"] = metadata["annotations"] | of_hash
    if plural == "services":
        given = [key for key in ("clusterIP", "clusterIPs") if obj["spec"].get(key) not in (None, "None", ["None"])]
        left["spec"] = left["spec"] | dict.fromkeys(given, "ADDRESS")
    if plural == "secrets":
        left["data"] = sorted(left["data"])
        left["trusted"] = _is_trusted(obj, objects)
    if plural in _WITH_OUR_STATUS:
        left["status"] = _status(obj)
    return left | {"metadata": metadata, "managers": _managers(obj)}


def _status(obj: Mapping[str, Any]) -> Any:
    """With `current` in the place of the present generation."""
    status = {key: value for key, value in (obj.get("status") or {}).items() if key != "seenFailures"}
    return _current(status, obj["metadata"]["generation"])


def _current(value: Any, generation: int) -> Any:
    if isinstance(value, dict):
        return {
            key: "current" if key == "observedGeneration" and part == generation else _current(part, generation)
            for key, part in value.items()
        }
    return [_current(part, generation) for part in value] if isinstance(value, list) else value


def _managers(obj: Mapping[str, Any]) -> dict[str, Any]:
    found = obj["metadata"].get("managedFields") or ()
    return {
        f"{each['manager']} {each['operation']} {each.get('subresource', '')}".strip(): _held(each)
        for each in found
        if each["manager"] in _OURS
    }


def _held(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Of the manager of replicas only these count: what else a pool was born with it shares with the other until its next write."""
    if entry["manager"] == names.REPLICAS_MANAGER:
        return {"f:replicas": "f:replicas" in (entry["fieldsV1"].get("f:spec") or {})}
    fields = dict(entry["fieldsV1"])
    if isinstance(status := fields.get("f:status"), Mapping):
        fields["f:status"] = {key: part for key, part in status.items() if key != "f:seenFailures"}
    return fields


def _is_trusted(obj: Mapping[str, Any], objects: Objects) -> bool:
    """Whether the certificate is the CA's own, or signed by it and delivered with it."""
    authority = next((each for (_, name), each in objects.items() if name.endswith("-ca") and each["data"]), None)
    if authority is None:
        return False
    try:
        issuer = x509.load_pem_x509_certificate(_pem(authority, "ca.crt"))
        trusted = _pem(obj, "ca.crt") == _pem(authority, "ca.crt")
        if "tls.crt" in obj["data"]:
            x509.load_pem_x509_certificate(_pem(obj, "tls.crt")).verify_directly_issued_by(issuer)
    except (ValueError, TypeError, KeyError) as error:
        raise AssertionError(f"{obj['metadata']['name']}: {error}") from None
    return trusted


def _pem(secret: Mapping[str, Any], key: str) -> bytes:
    return base64.b64decode(secret["data"][key])


def differences(ours: Picture, theirs: Picture, *, but: Collection[str] = ()) -> list[str]:
    """One line for each place where they differ: what is there, what should be. `but`: fields that may differ."""
    lines = [line for line in _differences(ours, theirs, "") if not line.partition(": ")[0].endswith(tuple(but))]
    return lines[:_MOST_SHOWN] + ([f"and {len(lines) - _MOST_SHOWN} more"] if len(lines) > _MOST_SHOWN else [])


def _differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if ours == theirs:
        return
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            if key not in theirs:
                yield f"{path}{key}: is there and should not be: {_short(ours[key])}"
            elif key not in ours:
                yield f"{path}{key}: is missing: {_short(theirs[key])}"
            else:
                yield from _differences(ours[key], theirs[key], f"{path}{key}.")
        return
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(one, other, f"{path}{place}.")
        return
    yield f"{path[:-1]}: {_short(ours)} should be {_short(theirs)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else f"{text[:160]}..."
