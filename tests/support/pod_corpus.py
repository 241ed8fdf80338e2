"""The corpus of pod snippets: what each is, and a job that has it in both kinds of its pods."""

import copy
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl_cli.yaml_document import read_documents
from support.jobs import simulated_job
from support.tree import ROOT

_REFUSED = re.compile(r"^# refused: (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """One file."""

    name: str
    pod: dict[str, Any]
    refused: str
    """The line that is given, from `pod` on; empty: it is accepted."""

    def job(self) -> dict[str, Any]:
        """A job named after it with it in the trainer's pod and in a pool's."""
        document = simulated_job()
        document["metadata"]["name"] = self.name
        document["spec"]["trainer"]["pod"] = document["spec"]["generators"][0]["pod"] = copy.deepcopy(self.pod)
        return document


def _read(path: Path) -> Snippet:
    text = path.read_text()
    found = _REFUSED.search(text)
    return Snippet(name=path.stem, pod=read_documents(text)[0].data, refused=found[1] if found else "")


SNIPPETS = [_read(path) for path in sorted((ROOT / "tests/corpus/pods").glob("*.yaml"))]
ACCEPTED = [snippet for snippet in SNIPPETS if not snippet.refused]
REFUSED = [snippet for snippet in SNIPPETS if snippet.refused]


def missing(wanted: object, there: object, path: str = "pod") -> list[str]:
    """Paths of what a snippet says and a planned pod does not: items of lists by name, or in the same order; amounts as text."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        return [fault for key, value in wanted.items() for fault in missing(value, there.get(key), f"{path}.{key}")]
    if isinstance(wanted, list) and isinstance(there, list):
        pairs = [(item, _same(item, there)) for item in wanted]
        return [fault for n, (item, found) in enumerate(pairs) for fault in missing(item, found, f"{path}[{n}]")]
    equal = wanted == there or (isinstance(wanted, int) and str(wanted) == there)
    return [] if equal or _is_default(wanted, there) else [path]


def _is_default(wanted: object, there: object) -> bool:
    """Whether it is left out since it is what a Pod has anyway."""
    return there is None and wanted in (False, "Equal", "IfNotPresent")


def _same(item: object, items: list[Any]) -> object:
    if not isinstance(item, dict):
        return item if item in items else None
    key = next((key for key in ("mountPath", "name") if key in item), "")
    if not key:
        return next((one for one in items if not missing(item, one)), None)
    return next((one for one in items if isinstance(one, dict) and one.get(key) == item[key]), None)
