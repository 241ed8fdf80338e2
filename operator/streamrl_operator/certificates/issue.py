"""Makes and reads certificates, with `cryptography`. EC P-256; the keys never leave these values.

Owns: what stands in a CA and in a leaf. Does not own: when they are made (`plan.py`), where they are kept (`vault.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streamrl import names
from streamrl_operator.certificates.plan import Lives

_SKEW_S = 300.0
"""Clocks of other machines may be behind by so much; at most a tenth of the life."""
_SKEW_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who a leaf is for."""

    namespace: str
    job: str
    role: str


def new_ca(job: str, *, now: datetime, lives: Lives) -> Pair:
    """A CA of one job. Its name has a number, since two of them are trusted while one follows the other."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{job} CA {serial:040x}"[:64])])
    usage = _usage(signs_certificates=True)
    builder = _builder(name, issuer=name, key=key, serial=serial, not_before=_before(now, lives.ca_s))
    builder = builder.not_valid_after(now + timedelta(seconds=lives.ca_s))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return _pair(builder.sign(key, hashes.SHA256()), key)


def new_leaf(holder: Holder, *, ca: Pair, now: datetime, lives: Lives) -> Pair:
    """A role's leaf; it never outlives its CA."""
    authority, signing = x509.load_pem_x509_certificate(ca.certificate), _key(ca.key)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{holder.job} {holder.role}")])
    not_before = max(_before(now, lives.leaf_s), authority.not_valid_before_utc)
    builder = _builder(
        name, issuer=authority.subject, key=key, serial=x509.random_serial_number(), not_before=not_before
    )
    builder = builder.not_valid_after(min(now + timedelta(seconds=lives.leaf_s), authority.not_valid_after_utc))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(_purposes(holder)), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(alternative_names(holder)), critical=False)
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    builder = builder.add_extension(issuer_key, critical=False)
    return _pair(builder.sign(signing, hashes.SHA256()), key)


def alternative_names(holder: Holder) -> list[x509.GeneralName]:
    """The role's URI; and where the role serves (all but generators), the addresses at which it is dialled."""
    found: list[x509.GeneralName] = [
        x509.UniformResourceIdentifier(names.role_uri(holder.namespace, holder.job, holder.role))
    ]
    if holder.role == "generator":
        return found
    service, pods = names.scheduler(holder.job), f"*.{names.trainer(holder.job)}"
    suffixes = ("", f".{holder.namespace}", f".{holder.namespace}.svc", f".{holder.namespace}.svc.cluster.local")
    hosts = [*(service + suffix for suffix in suffixes), *(pods + suffix for suffix in suffixes[1:]), "localhost"]
    return found + [x509.DNSName(host) for host in hosts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What matters of a certificate whose key belongs to it."""

    certificate: x509.Certificate
    fingerprint: str

    @property
    def not_before(self) -> datetime:
        """UTC."""
        return self.certificate.not_valid_before_utc

    @property
    def not_after(self) -> datetime:
        """UTC."""
        return self.certificate.not_valid_after_utc


def read(pair: Pair) -> Read | None:
    """A certificate with its key; None if they cannot be read or do not belong together."""
    try:
        certificate = x509.load_pem_x509_certificate(pair.certificate)
        if _key(pair.key).public_key() != certificate.public_key():
            return None
    except (ValueError, TypeError):
        return None
    return Read(certificate=certificate, fingerprint=fingerprint(certificate))


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
    client, server = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
    return [client] if holder.role == "generator" else [client, server]


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    name: x509.Name, *, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, serial: int, not_before: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer_name=issuer, subject_name=name, public_key=key.public_key())
    builder = builder.serial_number(serial).not_valid_before(not_before)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _before(now: datetime, life_s: float) -> datetime:
    return now - timedelta(seconds=min(_SKEW_S, life_s * _SKEW_SHARE))


def _pair(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return Pair(
        certificate=certificate.public_bytes(encoding),
        key=key.private_bytes(encoding, form, serialization.NoEncryption()),
    )


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not an EC key")
    return key
