"""Which cluster is meant: kubeconfig files as kubectl finds and merges them, and the chosen context. Opens no connection."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.files import read_text
from streamrl.spec.parse import suggest
from streamrl_cli.jobfile import MAX_FILE_BYTES, documents_in

VARIABLE = "KUBECONFIG"
_FIX = "give one that kubectl can use"
_FILES = {
    "cluster": ("certificate-authority",),
    "user": ("client-certificate", "client-key", "tokenFile"),
    "context": (),
}


class NoKubeconfigError(UserError):
    """There is no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A context, and all that is needed to go there."""

    context: str
    text: str
    """One kubeconfig; paths in it are absolute."""
    source: str
    """The files that it came from."""


def choose(*, kubeconfig: Path | None, context: str | None, environ: Mapping[str, str] = os.environ) -> Chosen:
    """The context that is meant: of `kubeconfig`, else of KUBECONFIG, else of ~/.kube/config.

    Raises:
        NoKubeconfigError: there is no such file.
        UserError: there is no such context, or a file cannot be read.
    """
    paths = [path for path in _paths(kubeconfig, environ) if path.is_file()]
    if not paths:
        tried = ", ".join(map(str, _paths(kubeconfig, environ)))
        fix = "give --kubeconfig, or set KUBECONFIG to a file that kubectl can use"
        raise NoKubeconfigError(field="kubeconfig", rule=f"there is none at {tried}", fix=fix)
    source = ", ".join(map(str, paths))
    merged = _merged([_read(path) for path in paths])
    name = context or merged["current-context"]
    known = [entry["name"] for entry in merged["contexts"]]
    if not name:
        raise UserError(
            field=source, rule="has no current context", fix=f"give --context; known: {', '.join(known) or 'none'}"
        )
    if name not in known:
        raise UserError(field=source, rule="has no such context", got=name, fix=suggest(name, known))
    return Chosen(context=name, text=json.dumps(merged), source=source)


def _paths(kubeconfig: Path | None, environ: Mapping[str, str]) -> list[Path]:
    if kubeconfig is not None:
        return [kubeconfig]
    if environ.get(VARIABLE):
        return [Path(part).expanduser() for part in environ[VARIABLE].split(os.pathsep) if part]
    return [Path(environ.get("HOME", "~")).expanduser() / ".kube/config"]


def _read(path: Path) -> dict[str, Any]:
    """A kubeconfig with absolute paths, of programs too."""
    documents = documents_in(read_text(path, most_bytes=MAX_FILE_BYTES, fix=_FIX), path=path)
    config = documents[0].data if len(documents) == 1 else None
    if not isinstance(config, dict) or not all(_is_list_of_named(config.get(f"{kind}s"), kind) for kind in _FILES):
        raise UserError(field=str(path), rule="is not a kubeconfig", fix=_FIX)
    for kind, keys in _FILES.items():
        for entry in config.get(f"{kind}s") or []:
            inner = entry.get(kind) or {}
            inner |= {key: _beside(path, inner[key]) for key in keys if inner.get(key)}
            match inner.get("exec"):
                case {"command": str(command)} if "/" in command:  # any other is looked for in PATH
                    inner["exec"]["command"] = _beside(path, command)
    return config


def _beside(path: Path, file: str) -> str:
    return str((path.parent / file).absolute())


def _is_list_of_named(entries: object, kind: str) -> bool:
    return entries is None or (isinstance(entries, list) and all(_is_named(entry, kind) for entry in entries))


def _is_named(entry: object, kind: str) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return False
    inner = entry.get(kind) or {}
    return isinstance(inner, dict) and all(isinstance(inner.get(key) or "", str) for key in _FILES[kind])


def _merged(configs: list[dict[str, Any]]) -> dict[str, Any]:
    """As kubectl merges: of equal names the first counts."""
    merged: dict[str, Any] = {
        "current-context": next((c["current-context"] for c in configs if c.get("current-context")), "")
    }
    for kind in _FILES:
        found: dict[str, Any] = {}
        for config in configs:
            for entry in config.get(f"{kind}s") or []:
                found.setdefault(str(entry["name"]), entry)
        merged[f"{kind}s"] = list(found.values())
    return merged
