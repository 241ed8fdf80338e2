"""Ports of this machine."""

import socket

PORTS = range(20_000, 30_000)
"""Below those that Linux gives to whoever asks for any port, or connects."""
_claims: list[socket.socket] = []


def free_port() -> int:
    """A loopback port that is this process's until it ends: nobody is given it by chance, and no other test process takes it."""
    for port in PORTS:
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe:
            try:
                claim.bind(f"\0streamrl-test-port-{port}")  # a name that ends with us and leaves no file
                probe.bind(("127.0.0.1", port))
            except OSError:
                claim.close()
                continue
        _claims.append(claim)
        return port
    raise AssertionError(f"no port of {PORTS} is free")
