"""Where it is written how an API server is reached: kubeconfigs, and the service account of a pod.

Owns: what a kubeconfig may say. Does not own: which file is meant (the commands' `kubeconfig.py`; the operator is told), credentials
once they are found. A kubeconfig of another cluster (a Secret's value) goes the same way as a file, after a stricter look.
"""

import base64
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from streamrl.errors import UserError
from streamrl_operator.kube.credentials import Plugin, TokenFile, load_pair, read_text
from streamrl_operator.kube.oidc import Oidc, Provider
from streamrl_operator.kube.rest_config import RestConfig, TokenSource

SERVICE_ACCOUNT_DIR = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SCHEMES = ("http://", "https://")
_MEMBER_FIELDS = {
    "cluster": {"server", "certificate-authority-data", "tls-server-name"},
    "user": {"token", "client-certificate-data", "client-key-data"},
}
"""All that a kubeconfig of a member may say. What else there is starts programs, reads our files, or trusts anybody."""
_NO_KUBECONFIG = (YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError)


def find(kubeconfig: Path | None) -> RestConfig:
    """The cluster that this process belongs to: the kubeconfig if there is one, else the pod's service account."""
    if kubeconfig is not None:
        return from_kubeconfig(read_text(kubeconfig), base=kubeconfig.parent, source=str(kubeconfig))
    return from_service_account(SERVICE_ACCOUNT_DIR, os.environ)


def from_service_account(folder: Path, environ: Mapping[str, str]) -> RestConfig:
    """As a pod with a mounted token reaches its own cluster."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (folder / "token").exists():
        fix = "set KUBECONFIG outside of a cluster"
        raise UserError(field="KUBECONFIG", rule="must be set where no service account is mounted", fix=fix)
    host = f"[{host}]" if ":" in host else host
    return RestConfig(
        server=f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        source=TokenFile(folder / "token"),
        namespace=read_text(folder / "namespace").strip() if (folder / "namespace").exists() else "default",
    )


def of_member(text: str, *, source: str) -> RestConfig:
    """As a kubeconfig in a Secret says, whoever wrote it: it runs nothing here, and reads none of our files.

    Raises:
        UserError: it would, or is none.
    """
    try:
        _, cluster, user = _parts(YAML(typ="safe", pure=True).load(text))
    except _NO_KUBECONFIG as error:
        rule = f"must be a kubeconfig with a current context, cluster and user ({type(error).__name__})"  # its text may quote a token
        raise UserError(field=source, rule=rule) from None
    for part, given in (("cluster", cluster), ("user", user)):
        if others := sorted(str(key) for key, value in given.items() if key not in _MEMBER_FIELDS[part] and value):
            allowed = ", ".join(sorted(_MEMBER_FIELDS[part]))
            raise UserError(field=source, rule=f"{part} may have only {allowed}", got=", ".join(others))
    if not str(cluster.get("server", "")).startswith("https://"):
        raise UserError(field=source, rule="cluster.server must begin with https://", got=cluster.get("server"))
    found = from_kubeconfig(text, source=source)
    if cluster.get("certificate-authority-data") and not _pem(cluster, "certificate-authority", base=Path()):
        raise UserError(field=source, rule="cluster.certificate-authority-data must be a certificate in base64")
    return found


def from_kubeconfig(
    text: str, *, base: Path | None = None, source: str = "kubeconfig", context: str = ""
) -> RestConfig:
    """As the current (or the named) context of a kubeconfig says; files in it are relative to `base`."""
    try:
        config = YAML(typ="safe", pure=True).load(text)
        return _rest_config(config, context=context, base=base or Path())
    except UserError:
        raise
    except (*_NO_KUBECONFIG, OSError) as error:
        fix = "give one that kubectl can use"
        raise UserError(
            field=source, rule=f"must be a kubeconfig with a current context ({_why(error)})", fix=fix
        ) from None


def _why(error: Exception) -> str:
    """What is wrong, without what stands there: that may be a secret."""
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_input=False)
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in found)
    if isinstance(error, YAMLError):
        mark = getattr(error, "problem_mark", None)
        return f"{type(error).__name__}{f' in line {mark.line + 1}' if mark else ''}"
    return str(error)


def _rest_config(config: Mapping[str, Any], *, context: str, base: Path) -> RestConfig:
    chosen, cluster, user = _parts(config, context)
    server = str(cluster["server"]).strip().rstrip("/")
    scheme = urlsplit(server).scheme
    if scheme not in ("http", "https"):
        raise ValueError(f"server must begin with {' or '.join(_SCHEMES)}")
    proxy = cluster.get("proxy-url") or None
    if proxy and not str(proxy).startswith(_SCHEMES):
        raise ValueError(f"proxy-url must begin with {' or '.join(_SCHEMES)}, not {str(proxy).partition(':')[0]}")
    return RestConfig(
        server=server,
        tls=_tls(cluster, user, base=base) if scheme == "https" else None,
        tls_server_name=cluster.get("tls-server-name") or None,
        proxy=proxy,
        namespace=chosen.get("namespace") or "default",
        token=user.get("token"),
        source=_source(user, base=base),
        impersonation=tuple(_impersonation(user)),
    )


def _parts(config: Mapping[str, Any], context: str = "") -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(context, cluster, user)"""
    chosen = _named(config["contexts"], context or config["current-context"], "context")
    user = _named(config.get("users") or [], chosen["user"], "user") if chosen.get("user") else {}
    return chosen, _named(config["clusters"], chosen["cluster"], "cluster"), user


def _named(entries: list[dict[str, Any]], name: str, key: str) -> dict[str, Any]:
    for entry in entries:
        if entry["name"] == name:
            return dict(entry.get(key) or {})
    raise KeyError(f"no {key} {name}")


def _source(user: Mapping[str, Any], *, base: Path) -> TokenSource | None:
    """What knows the token, where it changes: as kubectl, the first of these."""
    if path := user.get("tokenFile"):
        return TokenFile(base / path)
    if plugin := user.get("exec"):
        found = Plugin.model_validate({name: value for name, value in dict(plugin).items() if value is not None})
        beside = {"command": str((base / found.command).absolute())} if "/" in found.command else {}
        return found.model_copy(update=beside)
    provider = dict(user.get("auth-provider") or {})
    if not provider:
        return None
    if provider.get("name") != "oidc":
        raise ValueError(f"auth-provider {provider.get('name')} is no more: use a credential plug-in (exec)")
    given = dict(provider.get("config") or {})
    return Oidc(Provider.model_validate(given), tls=_trust(given, "idp-certificate-authority", base=base))


def _impersonation(user: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Headers that say in whose name we act."""
    given: list[tuple[str, list[Any]]] = [
        ("Impersonate-User", [user.get("as")]),
        ("Impersonate-Uid", [user.get("as-uid")]),
        ("Impersonate-Group", user.get("as-groups") or []),
    ]
    extra = dict(user.get("as-user-extra") or {}).items()
    given += [(f"Impersonate-Extra-{quote(key, safe='')}", list(values)) for key, values in extra]
    headers = tuple((name, str(value)) for name, values in given for value in values if value)
    if headers and not user.get("as"):
        raise ValueError("as-groups, as-uid and as-user-extra need `as`")
    return headers


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], *, base: Path) -> ssl.SSLContext:
    context = _trust(cluster, "certificate-authority", base=base)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate, key = _pem(user, "client-certificate", base=base), _pem(user, "client-key", base=base)
    if certificate and key:
        load_pair(context, certificate, key)
    return context


def _trust(entry: Mapping[str, Any], name: str, *, base: Path) -> ssl.SSLContext:
    authority = _pem(entry, name, base=base)
    return ssl.create_default_context(cadata=authority.decode() if authority else None)


def _pem(entry: Mapping[str, Any], name: str, *, base: Path) -> bytes | None:
    if entry.get(f"{name}-data"):
        return base64.b64decode(entry[f"{name}-data"])
    return (base / entry[name]).read_bytes() if entry.get(name) else None
