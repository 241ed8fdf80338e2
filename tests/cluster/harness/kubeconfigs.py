"""Kubeconfig files: written whole, with the certificates inside, so that one can be copied anywhere."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from cluster.harness.certificates import Leaf

User = Mapping[str, Any]


def by_certificate(leaf: Leaf) -> User:
    """Credentials of a client certificate."""
    return {"client-certificate-data": _data(leaf.cert), "client-key-data": _data(leaf.key)}


def by_token(token: str) -> User:
    """Credentials of a bearer token."""
    return {"token": token}


def write(path: Path, *, server: str, authority: Path, user: User) -> Path:
    """Write a kubeconfig with one context."""
    return compose(path, {"server": server, "certificate-authority-data": _data(authority)}, user)


def derive(path: Path, original: Mapping[str, Any], user: User) -> Path:
    """Write a kubeconfig for the same cluster and another user."""
    return compose(path, current(original)[0], user)


def elsewhere(path: Path, original: Path, *, server: str) -> Path:
    """Write the same kubeconfig for another address of its API server."""
    cluster, user = current(YAML(typ="safe", pure=True).load(original.read_text()))
    return compose(path, cluster | {"server": server}, user)


def current(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (cluster, user) of the current context."""
    context = _named(config, "contexts", config["current-context"])["context"]
    return _named(config, "clusters", context["cluster"])["cluster"], _named(config, "users", context["user"])["user"]


def _named(config: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in config[kind] if entry["name"] == name)
    return found


def _data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def compose(path: Path, cluster: Mapping[str, Any], user: User) -> Path:
    """Write a kubeconfig of these two."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": dict(cluster)}],
        "users": [{"name": "test", "user": dict(user)}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1))  # YAML reads JSON
    path.chmod(0o600)
    return path
