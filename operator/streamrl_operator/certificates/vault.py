"""A job's certificates as Secrets: reads what is there, and carries out what is due.

Owns: the keys in the Secrets and the stamp of the last write. Does not own: the API server; `carry_out` returns Secrets to apply.

    <job>-ca           ca.crt ca.key, while it is being changed next.crt next.key too; mounted nowhere
    <job>-tls-<role>   ca.crt (one certificate, or two) tls.crt tls.key
"""

import base64
import binascii
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from streamrl import API_GROUP, names
from streamrl_operator.certificates import issue
from streamrl_operator.certificates.issue import Holder, Pair
from streamrl_operator.certificates.plan import (
    ROLES,
    Action,
    Ca,
    Leaf,
    Lives,
    NewCa,
    Promote,
    Seen,
    Signer,
    WriteLeaf,
    plan_certificates,
)
from streamrl_operator.planning.objects.meta import Plan

ANNOTATION_WRITTEN = f"{API_GROUP}/written-at"
"""When we last wrote the Secret; the steps of a CA's change are counted from it."""
_CA_KEYS: Mapping[Signer, tuple[str, str]] = {"present": ("ca.crt", "ca.key"), "next": ("next.crt", "next.key")}
_TRUST, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"

Secret = Mapping[str, Any]
Secrets = Mapping[str, Secret]
"""By name."""


def secret_names(job: str) -> tuple[str, ...]:
    """Of all Secrets with certificates of a job."""
    return (names.ca_secret(job), *(names.tls_secret(job, role) for role in ROLES))


def due(plan: Plan, secrets: Secrets, *, now: datetime, lives: Lives) -> tuple[list[dict[str, Any]], datetime | None]:
    """Secrets to apply now, CA first, and when to look again. Where a CA is applied, look again at once."""
    seen = see(plan, secrets)
    wanted = plan_certificates(seen, now=now, lives=lives)
    made = [_carry_out(action, plan=plan, secrets=secrets, now=now, lives=lives) for action in wanted.actions]
    # A Secret whose certificates are in order, but not its labels or its owner.
    made += [] if made else [_remade(plan, secret) for secret in secrets.values() if _is_astray(plan, secret)]
    return made, wanted.look_again


def see(plan: Plan, secrets: Secrets) -> Seen:
    """The certificates in the Secrets, as far as they are sound."""
    ca = secrets.get(names.ca_secret(plan.name))
    return Seen(
        present=_ca(ca, "present"),
        next=_ca(ca, "next"),
        leaves={role: _leaf(secrets.get(names.tls_secret(plan.name, role)), _holder(plan, role)) for role in ROLES},
    )


def _ca(secret: Secret | None, place: Signer) -> Ca | None:
    found = issue.read(_ca_pair(secret, place))
    if found is None:
        return None
    return Ca(fingerprint=found.fingerprint, not_before=found.not_before, not_after=found.not_after)


def _leaf(secret: Secret | None, holder: Holder) -> Leaf | None:
    if secret is None:
        return None
    found = issue.read(Pair(certificate=_data(secret, _CERTIFICATE), key=_data(secret, _KEY)))
    written = _written(secret)
    if found is None or written is None or not issue.is_for(found.certificate, holder):
        return None
    trusted = issue.read_trusted(_data(secret, _TRUST))
    return Leaf(
        signer=issue.signer_of(found.certificate, trusted),
        trusts=tuple(issue.fingerprint(certificate) for certificate in trusted),
        not_before=found.not_before,
        not_after=found.not_after,
        changed=written,
    )


def _carry_out(action: Action, *, plan: Plan, secrets: Secrets, now: datetime, lives: Lives) -> dict[str, Any]:
    ca = secrets.get(names.ca_secret(plan.name))
    if isinstance(action, WriteLeaf):
        return _write_leaf(action, plan=plan, secrets=secrets, now=now, lives=lives)
    present, following = _ca_pair(ca, "present"), _ca_pair(ca, "next")
    if isinstance(action, Promote):
        return _ca_secret(plan, {"present": following}, now=now)
    assert isinstance(action, NewCa)
    made = issue.new_ca(plan.name, now=now, lives=lives)
    return _ca_secret(
        plan, {"present": made} if action.place == "present" else {"present": present, "next": made}, now=now
    )


def _write_leaf(action: WriteLeaf, *, plan: Plan, secrets: Secrets, now: datetime, lives: Lives) -> dict[str, Any]:
    ca = secrets[names.ca_secret(plan.name)]
    old = secrets.get(names.tls_secret(plan.name, action.role))
    if action.signer is None:
        assert old is not None, "the leaf that is kept is there"
        pair = Pair(certificate=_data(old, _CERTIFICATE), key=_data(old, _KEY))
    else:
        pair = issue.new_leaf(_holder(plan, action.role), ca=_ca_pair(ca, action.signer), now=now, lives=lives)
    data = {
        _TRUST: b"".join(_ca_pair(ca, place).certificate for place in action.trusts),
        _CERTIFICATE: pair.certificate,
        _KEY: pair.key,
    }
    return _secret(plan, names.tls_secret(plan.name, action.role), kind="kubernetes.io/tls", data=data, written=now)


def _ca_secret(plan: Plan, pairs: Mapping[Signer, Pair], *, now: datetime) -> dict[str, Any]:
    data: dict[str, bytes] = {}
    for place, pair in pairs.items():
        certificate, key = _CA_KEYS[place]
        data |= {certificate: pair.certificate, key: pair.key}
    return _secret(plan, names.ca_secret(plan.name), kind="Opaque", data=data, written=now)


def _secret(plan: Plan, name: str, *, kind: str, data: Mapping[str, bytes], written: datetime) -> dict[str, Any]:
    metadata = plan.metadata(name) | {"annotations": {ANNOTATION_WRITTEN: written.astimezone(UTC).isoformat()}}
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": metadata, "data": encoded}


def _remade(plan: Plan, secret: Secret) -> dict[str, Any]:
    """The same Secret with the metadata that it should have; its certificates are as old as they were."""
    metadata = plan.metadata(secret["metadata"]["name"])
    stamp = (secret["metadata"].get("annotations") or {}).get(ANNOTATION_WRITTEN)  # a CA does without
    annotations = {} if stamp is None else {ANNOTATION_WRITTEN: stamp}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": secret["type"],
        "metadata": metadata | {"annotations": annotations},
        "data": dict(secret["data"]),
    }


def _is_astray(plan: Plan, secret: Secret) -> bool:
    metadata, wanted = secret["metadata"], plan.metadata(secret["metadata"]["name"])
    has_labels = wanted["labels"].items() <= (metadata.get("labels") or {}).items()
    return not has_labels or wanted["ownerReferences"] != metadata.get("ownerReferences")


def _holder(plan: Plan, role: str) -> Holder:
    return Holder(namespace=plan.namespace, job=plan.name, role=role)


def _ca_pair(secret: Secret | None, place: Signer) -> Pair:
    certificate, key = _CA_KEYS[place]
    return Pair(certificate=_data(secret, certificate), key=_data(secret, key))


def _data(secret: Secret | None, key: str) -> bytes:
    try:
        return base64.b64decode(((secret or {}).get("data") or {}).get(key, ""), validate=True)
    except binascii.Error:
        return b""


def _written(secret: Secret) -> datetime | None:
    text = (secret["metadata"].get("annotations") or {}).get(ANNOTATION_WRITTEN, "")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else None


__all__ = ["ANNOTATION_WRITTEN", "due", "secret_names", "see"]
