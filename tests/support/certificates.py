"""Real authorities and leaves for tests: what an operator would write into a job's Secrets."""

import datetime
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streamrl.names import role_uri

NAMESPACE, JOB = "team", "simulated"
DAY = datetime.timedelta(days=1)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass
class Authority:
    """A certificate authority."""

    name: str = "ca"
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    certificate: x509.Certificate = field(init=False)

    def __post_init__(self) -> None:
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(self.name))
            .issuer_name(_name(self.name))
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_now() - DAY)
            .not_valid_after(_now() + 10 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def leaf(
        self,
        role: str,
        *,
        namespace: str = NAMESPACE,
        job: str = JOB,
        expired: bool = False,
        uris: tuple[str, ...] = (),
        hosts: tuple[str, ...] = (),
    ) -> "Leaf":
        """A leaf that names its holder by `uris`; absent: by the role's. `hosts`: more names that it serves."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(uri) for uri in uris or (role_uri(namespace, job, role),)
        ]
        names += map(x509.DNSName, hosts)
        if role != "generator":
            names.append(x509.DNSName(f"{job}-scheduler"))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_name(f"{job}-{role}"))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_now() - 2 * DAY)
            .not_valid_after(_now() - DAY if expired else _now() + DAY)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        return Leaf(certificate=certificate, key=key)


@dataclass
class Leaf:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def chain(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def mount(directory: Path, *, trusted: tuple[Authority, ...], leaf: Leaf) -> Path:
    """Write the three files as a Secret's volume has them: links to links, all swapped at once. Returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    version = directory / f"..{len(list(directory.glob('..[0-9]*')))}"
    version.mkdir()
    (version / "ca.crt").write_bytes(b"".join(authority.pem for authority in trusted))
    (version / "tls.crt").write_bytes(leaf.chain)
    (version / "tls.key").write_bytes(leaf.key_pem)
    fresh = directory / "..data_tmp"
    fresh.symlink_to(version.name)
    fresh.rename(directory / "..data")
    for name in ("ca.crt", "tls.crt", "tls.key"):
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    return directory
