"""The corpus of job files as an API server is given it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.harness.api import GROUP, Answer, Api

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests/corpus"
GOOD = sorted((CORPUS / "good").glob("*.yaml")) + sorted((ROOT / "examples").glob("*.yaml"))
BAD = sorted((CORPUS / "bad").glob("*.yaml"))

_EXPECTED = re.compile(rb"^# expect: (?:\d+: )?([^:\n]+): ", re.MULTILINE)
_NAMESPACE = re.compile(rb"^  namespace: .*\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFile:
    """A file that `streamrl validate` refuses."""

    path: Path
    fields: tuple[str, ...]
    """What it names, a line each."""
    local_only: bool
    """The contract takes it: only a run on this machine refuses it."""


def read_bad(path: Path) -> BadFile:
    """Read what the file says of itself."""
    raw = path.read_bytes()
    fields = tuple(field.decode(errors="replace") for field in _EXPECTED.findall(raw))
    return BadFile(path=path, fields=fields, local_only=b"# spec-only: OK" in raw)


def documents(path: Path) -> Iterator[bytes]:
    """Each document of a file, as kubectl splits it; without the namespace, which the path of the request gives."""
    for part in re.split(rb"^---\s*$", path.read_bytes(), flags=re.MULTILINE):
        if re.sub(rb"^\s*#.*$", b"", part, flags=re.MULTILINE).strip():
            yield _NAMESPACE.sub(b"", part)


def ask(api: Api, namespace: str, document: bytes) -> Answer:
    """Dry-run create of one document; the API server reads the YAML itself, with the parser that kubectl has."""
    path = f"{GROUP}/namespaces/{namespace}/rljobs"
    return api.create_yaml(path, document, dryRun="All")
