"""The certificates of this process: read, checked, read again when they change, handed to gRPC and to `ssl`.

    STREAMRL_TLS_DIR   ca.crt   authorities that are trusted: one, or two while they are being changed
                       tls.crt  our leaf, whose URI says who we are (`auth.py`)
                       tls.key  its key

Owns the files and what the two are made to do with them: servers demand a certificate of every peer and take the files of the
moment at each handshake; a new channel takes those of its moment. Addresses differ from cluster to cluster, so the name
that a gRPC server's leaf must have is always that of the scheduler's Service, or from another cluster one with the job's UID: only scheduler
and trainer have these, a generator's leaf has no host at all. Over `ssl` both sides ask for the role (`auth.py`), whatever the host, which is only sent as
SNI. Connections live `age_s` at most, so that no leaf is relied on for longer than that
after it was taken away.

Invariant: files that do not fit together (a swap seen half-way, a key of another leaf) are never used; what was good
before stays, and the log says so once.
"""

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from streamrl.errors import UserError
from streamrl.keys import ENV_TLS_DIR
from streamrl.names import role_uri, scheduler
from streamrl_workers.stream.auth import PeerIdentity, parse_identity

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

AGE_S = 3600.0
"""Longest life of a connection; leaves live for days."""
GRACE_S = 60.0
"""Most for calls that are still going on at that age: clients have long dialled anew (`channel.Dialler`)."""
FILE_KEY = "tls.key"
_FILES = ("ca.crt", "tls.crt", FILE_KEY)
_READS = 5
"""Attempts to see three files of one swap."""

log = logging.getLogger("streamrl.tls")
_Fingerprint = tuple[tuple[int, int, int, int], ...]
Options = tuple[tuple[str, str | int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Three files that fit together."""

    ca: bytes
    chain: bytes
    key: bytes
    identity: PeerIdentity


class Tls:
    """The files of one directory."""

    def __init__(self, directory: Path, *, age_s: float = AGE_S, server_name: str = "") -> None:
        """Read them. `server_name`: that a server's leaf must have, and SNI; empty: of the scheduler's Service.

        Raises:
            UserError: they are missing, or do not fit together.
        """
        self.age_s = age_s
        self._server_name = server_name
        self._directory = directory
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        try:
            self._seen: _Fingerprint | None = _fingerprint(directory)
            self._material = _read(directory)
        except (OSError, ValueError) as error:
            raise UserError(
                field=f"{ENV_TLS_DIR}={directory}",
                rule=f"must hold {', '.join(_FILES)} that fit together: {error}",
                fix="let the operator write the job's Secrets anew",
            ) from None

    @property
    def identity(self) -> PeerIdentity:
        """Who we are."""
        return self._material.identity

    @property
    def server_name(self) -> str:
        """That a server's leaf must have."""
        return self._server_name or scheduler(self.identity.job)

    def material(self) -> Material:
        """The newest files that are good."""
        with self._lock:
            try:
                found = _fingerprint(self._directory)
                if found != self._seen:
                    self._material, self._seen = _read(self._directory), found
                    log.info("took new certificates of %s", self._directory)
            except (OSError, ValueError) as error:
                if self._seen is not None:
                    log.warning("new certificates of %s cannot be used, the old ones stay: %s", self._directory, error)
                self._seen = None  # look again next time, say nothing more
            return self._material

    def server_credentials(self) -> grpc.ServerCredentials:
        """Of a server that takes the files of the moment at each handshake, and peers with a certificate only."""
        served = [self.material()]

        def newest() -> grpc.ServerCertificateConfiguration | None:
            material = self.material()
            if material is served[0]:
                return None
            served[0] = material
            return _configuration(material)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served[0]), newest, require_client_authentication=True
        )

    def server_options(self) -> Options:
        """What bounds the life of connections."""
        return (
            ("grpc.max_connection_age_ms", round(1000 * self.age_s)),
            ("grpc.max_connection_age_grace_ms", round(1000 * min(GRACE_S, self.age_s))),
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of a new channel: the files of this moment."""
        material = self.material()
        return grpc.ssl_channel_credentials(material.ca, material.key, material.chain)

    def channel_options(self) -> Options:
        """The name that a server's leaf must have."""
        return (("grpc.ssl_target_name_override", self.server_name),)

    def ssl_context(self, *, server: bool) -> ssl.SSLContext:
        """Of a new connection: the files of this moment, and peers with a certificate only. Who the peer is remains to be asked."""
        return _ssl_context(self.material(), server=server)


def peer_names(connection: ssl.SSLSocket) -> list[str]:
    """Alternative names of the other side's leaf, of whatever kind; the handshake has shown that it is of our authority."""
    leaf: Any = connection.getpeercert() or {}
    return [name for _, name in leaf.get("subjectAltName", ())]


@lru_cache(maxsize=2)
def _ssl_context(material: Material, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # a resumed session would show no certificate
    context.load_verify_locations(cadata=material.ca.decode())
    handle = os.memfd_create("tls")  # `ssl` reads files only; this one is on no disk, and of this moment
    try:
        os.write(handle, material.key + b"\n" + material.chain)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    return context


def _fingerprint(directory: Path) -> _Fingerprint:
    stats = [(directory / name).stat() for name in _FILES]
    return tuple((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)


def _read(directory: Path) -> Material:
    """Three files of one moment: a swap between two reads is seen by their fingerprints."""
    for _ in range(_READS):
        before = _fingerprint(directory)
        ca, chain, key = [(directory / name).read_bytes() for name in _FILES]
        if _fingerprint(directory) == before:
            return Material(ca=ca, chain=chain, key=key, identity=_check(ca=ca, chain=chain, key=key))
    raise ValueError("they change faster than they can be read")


def _check(*, ca: bytes, chain: bytes, key: bytes) -> PeerIdentity:
    """Who the leaf says that we are.

    Raises:
        ValueError: one is no PEM, the key is of another leaf, or the leaf names no role.
    """
    from cryptography import x509  # a process without TLS does not pay for it
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    x509.load_pem_x509_certificates(ca)
    leaf = x509.load_pem_x509_certificates(chain)[0]
    if load_pem_private_key(key, password=None).public_key() != leaf.public_key():
        raise ValueError("tls.key is not the key of tls.crt")
    return _named(leaf)


def _named(leaf: "Certificate") -> PeerIdentity:
    from cryptography import x509

    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("tls.crt has no subject alternative names") from None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    found = [identity for identity in map(parse_identity, uris) if identity is not None]
    if len(found) != 1:
        raise ValueError(f"tls.crt must have one URI {role_uri('<namespace>', '<job>', '<role>')}, it has {uris}")
    return found[0]


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], root_certificates=material.ca)
