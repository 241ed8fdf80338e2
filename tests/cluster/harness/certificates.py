"""Certificates and keys of a test control plane: one authority, leaves for servers and clients.

Owns nothing but bytes in a folder. All of it is thrown away with the cluster, so keys lie there in the clear.
"""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates into one folder; its own are `<name>.crt`, `<name>.key`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name(f"streamrl-test-{name}")
        signed = (
            _builder(self._subject, self._subject, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.leaf = Leaf(cert=folder / f"{name}.crt", key=folder / f"{name}.key")
        _write(self.leaf, signed, self._key)

    @property
    def cert(self) -> Path:
        """The authority's own certificate."""
        return self.leaf.cert

    def issue(self, file: str, user: str, *, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()) -> Leaf:
        """Sign a leaf for `user` in `groups`; with `hosts` it serves too."""
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        builder = (
            _builder(_name(user, groups), self._subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        leaf = Leaf(cert=self._folder / f"{file}.crt", key=self._folder / f"{file}.key")
        _write(leaf, builder.sign(self._key, hashes.SHA256()), key)
        return leaf


def service_account_key(folder: Path) -> Leaf:
    """Make the key pair that signs service account tokens; `cert` is the public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    pair = Leaf(cert=folder / "service-accounts.pub", key=folder / "service-accounts.key")
    pair.cert.write_bytes(
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    pair.key.write_bytes(_private(key))
    return pair


def _name(user: str, groups: tuple[str, ...] = ()) -> x509.Name:
    named = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*named, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + _LIFE)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )


def _write(leaf: Leaf, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    leaf.cert.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    leaf.key.write_bytes(_private(key))
    leaf.key.chmod(0o600)
