"""A job's certificates as Secrets: makes them, reads them, and says which Secrets to apply. EC P-256; keys never leave these values.

Owns: what stands in a CA and in a leaf, the keys in the Secrets, the stamp of the last write. Does not own: when a certificate is due
(`planning/certificates.py`), the API server (`certify.py` applies what `due` gives).

    <job>-ca           ca.crt ca.key, while it is being changed next.crt next.key too; mounted nowhere
    <job>-tls-<role>   ca.crt (one certificate, or two) tls.crt tls.key; of generators in a member too, which has a copy
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streamrl import API_GROUP, names
from streamrl.spec.base import minimal
from streamrl_operator.planning.certificates import (
    ROLES,
    Action,
    Ca,
    Leaf,
    Lives,
    Promote,
    Seen,
    Signer,
    WriteLeaf,
    plan_certificates,
    roles_of,
)
from streamrl_operator.planning.members import clusters_of
from streamrl_operator.planning.objects.job_file import canonical
from streamrl_operator.planning.objects.shared import JobPlan, annotated

_SKEW_S = 300.0
"""Clocks of other machines may be behind by so much; at most a tenth of the life."""
_SKEW_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who a leaf is for."""

    namespace: str
    job: str
    role: str
    uid: str = ""
    """Of a job that is dialled from other clusters, whose generators demand names with it."""

    @property
    def is_dialled(self) -> bool:
        """Whether it serves: generators, wherever they are, and agents dial out."""
        return self.role in _DIALLED


def new_ca(job: str, *, now: datetime, lives: Lives) -> KeyPair:
    """A CA of one job. Its name has a number, since two of them are trusted while one follows the other."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{job} CA {serial:040x}"[:64])])
    builder = _builder(name, issuer=name, key=key, is_ca=True).serial_number(serial)
    builder = builder.not_valid_before(_before(now, lives.ca_s)).not_valid_after(now + timedelta(seconds=lives.ca_s))
    return _pair(builder.sign(key, hashes.SHA256()), key)


def new_leaf(holder: Holder, *, ca: KeyPair, now: datetime, lives: Lives) -> KeyPair:
    """A role's leaf; it never outlives its CA."""
    authority, signing = x509.load_pem_x509_certificate(ca.certificate), _key(ca.key)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{holder.job} {holder.role}"[:64])])
    builder = _builder(name, issuer=authority.subject, key=key, is_ca=False)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(max(_before(now, lives.leaf_s), authority.not_valid_before_utc))
    builder = builder.not_valid_after(min(now + timedelta(seconds=lives.leaf_s), authority.not_valid_after_utc))
    builder = builder.add_extension(x509.ExtendedKeyUsage(_purposes(holder)), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternative_names(holder)), critical=False)
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = builder.add_extension(issuer_key, critical=False)
    return _pair(builder.sign(signing, hashes.SHA256()), key)


def alternative_names(holder: Holder) -> list[x509.GeneralName]:
    """The role's URI; and where the role serves, the addresses at which it is dialled."""
    found: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(names.role_uri(holder.namespace, holder.job, holder.role))
    ]
    if not holder.is_dialled:
        return found
    service, pods = names.scheduler(holder.job), f"*.{names.trainer(holder.job)}"
    suffixes = ("", f".{holder.namespace}", f".{holder.namespace}.svc", f".{holder.namespace}.svc.cluster.local")
    hosts = [*(service + suffix for suffix in suffixes), *(pods + suffix for suffix in suffixes[1:]), "localhost"]
    if holder.uid:
        hosts.append(names.tls_name(_DIALLED[holder.role], uid=holder.uid))
    return found + [x509.DNSName(host) for host in hosts]


_DIALLED = {"scheduler": "scheduler", "trainer": "weights"}
"""Role -> the service of it that generators dial."""


def read(pair: KeyPair) -> x509.Certificate | None:
    """A certificate with its key; None if they cannot be read or do not belong together."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        if _key(pair.key).public_key() != certificate.public_key():
            return None
    except (ValueError, TypeError):
        return None
    return certificate


def read_trusted(bundle: bytes) -> list[x509.Certificate]:
    """The certificates of a bundle, in its order; none if it cannot be read."""
    try:
        return x509.load_pem_x509_certificates(bundle)
    except ValueError:
        return []


def fingerprint(certificate: x509.Certificate) -> str:
    """What tells certificates apart."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def signer_of(certificate: x509.Certificate, candidates: Sequence[x509.Certificate]) -> str:
    """Fingerprint of the one that signed it; empty if none of them did."""
    for candidate in candidates:
        try:
            certificate.verify_directly_issued_by(candidate)
        except (ValueError, TypeError, InvalidSignature):
            continue
        return fingerprint(candidate)
    return ""


def is_for(certificate: x509.Certificate, holder: Holder) -> bool:
    """Whether it has the names and purposes that a new one would have."""
    try:
        extensions = certificate.extensions
        found = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return False
    return list(found) == alternative_names(holder) and list(purposes) == _purposes(holder)


def _purposes(holder: Holder) -> list[x509.ObjectIdentifier]:
    """All but agents serve: generators pass weights on."""
    serving = [] if holder.role == names.AGENTS else [ExtendedKeyUsageOID.SERVER_AUTH]
    return [ExtendedKeyUsageOID.CLIENT_AUTH, *serving]


def _builder(
    name: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, is_ca: bool
) -> x509.CertificateBuilder:
    usage = x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )
    builder = x509.CertificateBuilder(issuer_name=issuer, subject_name=name, public_key=key.public_key())
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    constraints = x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None)
    return builder.add_extension(constraints, critical=True).add_extension(usage, critical=True)


def _before(now: datetime, life_s: float) -> datetime:
    return now - timedelta(seconds=min(_SKEW_S, life_s * _SKEW_SHARE))


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> KeyPair:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return KeyPair(
        certificate=certificate.public_bytes(encoding),
        key=key.private_bytes(encoding, form, serialization.NoEncryption()),
    )


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not an EC key")
    return key


ANNOTATION_WRITTEN = f"{API_GROUP}/written-at"
"""When we last wrote the Secret; the steps of a CA's change are counted from it."""
ANNOTATION_COMMON = f"{API_GROUP}/common-metadata"
"""What the Secret has of the job's `commonMetadata`, as JSON."""
_CA_KEYS: Mapping[Signer, tuple[str, str]] = {"present": ("ca.crt", "ca.key"), "next": ("next.crt", "next.key")}
_TRUST, _CERTIFICATE, _KEY = "ca.crt", "tls.crt", "tls.key"

Secret = Mapping[str, Any]
Secrets = Mapping[str, Secret]
"""By name."""


def secret_names(job: str, *, roles: Sequence[str] = ROLES) -> tuple[str, ...]:
    """Of all Secrets with certificates of a job."""
    return (names.ca_secret(job), *(names.tls_secret(job, role) for role in roles))


def due(
    plan: JobPlan, secrets: Secrets, *, now: datetime, lives: Lives, copies: Mapping[str, Secret] | None = None
) -> tuple[list[dict[str, Any]], datetime | None]:
    """Secrets to apply now, CA first, and when to look again. Where a CA is applied, look again at once.

    `copies`: role -> the Secret with its leaf as it is in a member, where it was seen. A change of the CA waits for those that are behind.
    """
    seen = observe_certificates(plan, secrets)
    seen = replace(seen, leaves={**seen.leaves, **_not_delivered(plan, secrets, seen, copies=copies or {}, now=now)})
    wanted = plan_certificates(seen, now=now, lives=lives)
    made = [_perform(action, plan=plan, secrets=secrets, now=now, lives=lives) for action in wanted.actions]
    # A Secret whose certificates are in order, but not its labels or its owner.
    made += [] if made else [_remade(plan, secret) for secret in secrets.values() if _is_astray(plan, secret)]
    return made, wanted.next_check


def _not_delivered(
    plan: JobPlan, secrets: Secrets, seen: Seen, *, copies: Mapping[str, Secret], now: datetime
) -> dict[str, Leaf]:
    """Role -> its leaf as if it was written now, where a member has an older copy that is good still."""
    found: dict[str, Leaf] = {}
    for role, copy in copies.items():
        leaf, home = seen.leaves.get(role), secrets.get(names.tls_secret(plan.name, role))
        shown = read_trusted(_data(copy, _CERTIFICATE))
        is_good = bool(shown) and now < shown[0].not_valid_after_utc
        if leaf is not None and home is not None and is_good and copy.get("data") != home.get("data"):
            found[role] = replace(leaf, changed=now)
    return found


def lives_in(job: str, secrets: Secrets, *, roles: Sequence[str] = ROLES) -> dict[str, tuple[datetime, datetime]]:
    """Role, or `ca` -> when its certificate begins and ends; what cannot be read is left out."""
    places = {"ca": (names.ca_secret(job), _CA_KEYS["present"][0])}
    places |= {role: (names.tls_secret(job, role), _CERTIFICATE) for role in roles}
    found: dict[str, tuple[datetime, datetime]] = {}
    for role, (name, key) in places.items():
        for certificate in read_trusted(_data(secrets.get(name), key)):
            found[role] = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return found


def observe_certificates(plan: JobPlan, secrets: Secrets) -> Seen:
    """The certificates in the Secrets, as far as they are sound."""
    ca = secrets.get(names.ca_secret(plan.name))
    return Seen(
        present=_ca(ca, "present"),
        next=_ca(ca, "next"),
        leaves={
            role: _leaf(secrets.get(names.tls_secret(plan.name, role)), _holder(plan, role))
            for role in roles_of(plan.job)
        },
    )


def _ca(secret: Secret | None, place: Signer) -> Ca | None:
    found = read(_ca_pair(secret, place))
    if found is None:
        return None
    begin, end = found.not_valid_before_utc, found.not_valid_after_utc
    return Ca(fingerprint=fingerprint(found), not_before=begin, not_after=end)


def _leaf(secret: Secret | None, holder: Holder) -> Leaf | None:
    if secret is None:
        return None
    found = read(KeyPair(certificate=_data(secret, _CERTIFICATE), key=_data(secret, _KEY)))
    written = _written(secret)
    if found is None or written is None or not is_for(found, holder):
        return None
    trusted = read_trusted(_data(secret, _TRUST))
    return Leaf(
        signer=signer_of(found, trusted),
        trusts=tuple(fingerprint(certificate) for certificate in trusted),
        not_before=found.not_valid_before_utc,
        not_after=found.not_valid_after_utc,
        changed=written,
    )


def _perform(action: Action, *, plan: JobPlan, secrets: Secrets, now: datetime, lives: Lives) -> dict[str, Any]:
    if isinstance(action, WriteLeaf):
        return _write_leaf(action, plan=plan, secrets=secrets, now=now, lives=lives)
    ca = secrets.get(names.ca_secret(plan.name))
    if isinstance(action, Promote):
        return _ca_secret(plan, {"present": _ca_pair(ca, "next")}, now=now)
    made: dict[Signer, KeyPair] = {action.place: new_ca(plan.name, now=now, lives=lives)}
    return _ca_secret(
        plan, made if action.place == "present" else {"present": _ca_pair(ca, "present"), **made}, now=now
    )


def _write_leaf(action: WriteLeaf, *, plan: JobPlan, secrets: Secrets, now: datetime, lives: Lives) -> dict[str, Any]:
    ca = secrets[names.ca_secret(plan.name)]
    old = secrets.get(names.tls_secret(plan.name, action.role))
    if action.signer is None:
        assert old is not None, "the leaf that is kept is there"
        pair = KeyPair(certificate=_data(old, _CERTIFICATE), key=_data(old, _KEY))
    else:
        pair = new_leaf(_holder(plan, action.role), ca=_ca_pair(ca, action.signer), now=now, lives=lives)
    data = {
        _TRUST: b"".join(_ca_pair(ca, place).certificate for place in action.trusts),
        _CERTIFICATE: pair.certificate,
        _KEY: pair.key,
    }
    name = names.tls_secret(plan.name, action.role)
    return _secret(plan, name, kind="kubernetes.io/tls", data=_encoded(data), written=now.astimezone(UTC).isoformat())


def _ca_secret(plan: JobPlan, pairs: Mapping[Signer, KeyPair], *, now: datetime) -> dict[str, Any]:
    data: dict[str, bytes] = {}
    for place, pair in pairs.items():
        certificate, key = _CA_KEYS[place]
        data |= {certificate: pair.certificate, key: pair.key}
    written = now.astimezone(UTC).isoformat()
    return _secret(plan, names.ca_secret(plan.name), kind="Opaque", data=_encoded(data), written=written)


def _encoded(data: Mapping[str, bytes]) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _secret(plan: JobPlan, name: str, *, kind: str, data: Mapping[str, str], written: str | None) -> dict[str, Any]:
    made = plan.object("v1", "Secret", name, type=kind, data=dict(data))
    return annotated(made, {**_common(plan), **({} if written is None else {ANNOTATION_WRITTEN: written})})


def _common(plan: JobPlan) -> dict[str, str]:
    """Return the annotation with the labels and annotations that the job lists, by which one that is no longer listed is noticed."""
    common = plan.job.spec.common_metadata
    return {} if common is None else {ANNOTATION_COMMON: canonical(minimal(common))}


def _remade(plan: JobPlan, secret: Secret) -> dict[str, Any]:
    """The same Secret with the metadata that it should have; its certificates are as old as they were."""
    metadata = secret["metadata"]
    written = (metadata.get("annotations") or {}).get(ANNOTATION_WRITTEN)  # a CA does without
    return _secret(plan, metadata["name"], kind=secret["type"], data=secret["data"], written=written)


def _is_astray(plan: JobPlan, secret: Secret) -> bool:
    metadata, wanted = secret["metadata"], plan.metadata(secret["metadata"]["name"])
    has_labels = wanted["labels"].items() <= (metadata.get("labels") or {}).items()
    there = metadata.get("annotations") or {}
    has_annotations = wanted.get("annotations", {}).items() <= there.items()
    is_common = there.get(ANNOTATION_COMMON) == _common(plan).get(ANNOTATION_COMMON)
    in_order = has_labels and has_annotations and is_common
    return not in_order or wanted["ownerReferences"] != metadata.get("ownerReferences")


def _holder(plan: JobPlan, role: str) -> Holder:
    uid = plan.uid if clusters_of(plan.job) else ""
    return Holder(namespace=plan.namespace, job=plan.name, role=role, uid=uid)


def _ca_pair(secret: Secret | None, place: Signer) -> KeyPair:
    certificate, key = _CA_KEYS[place]
    return KeyPair(certificate=_data(secret, certificate), key=_data(secret, key))


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
