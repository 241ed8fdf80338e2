"""YAML of the texts: whole documents are valid, and pieces of a job make it no worse."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from streamrl.errors import UserErrors
from streamrl.spec.parse import parse_job
from streamrl.spec.schema import schema_at
from streamrl_cli.jobfile import check_file
from support.pages import Fence, Page, guides
from support.tree import ROOT

OURS = ("kind: RLJob", "kind: RLJobDefaults", "kind: RLCluster")
OF_OTHERS = {"providers", "scrape_configs"}
"""Keys of files that others read: Grafana, Prometheus."""
PLACES = ("", "spec", "spec.task", "spec.trainer", "spec.generators[0]", "spec.generators[0].engine")
"""Where a piece may belong; the first that has all of its keys."""
BLOCKS = [(page, fence) for page in guides() for fence in page.fences if fence.language == "yaml"]
WHOLE = [
    (page, fence)
    for page, fence in BLOCKS
    if "apiVersion: streamrl.io/" in fence.text and any(kind in fence.text.splitlines() for kind in OURS)
]
PIECES = [(page, fence) for page, fence in BLOCKS if "kind: " not in fence.text]


def _id(value: object) -> str:
    return value.name if isinstance(value, Page) else str(value.line) if isinstance(value, Fence) else str(value)


@pytest.mark.parametrize(("page", "fence"), WHOLE, ids=_id)
def test_a_whole_document_is_valid(page: Page, fence: Fence, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(fence.text, encoding="utf-8")
    _, mistakes = check_file(path)
    assert UserErrors(mistakes).lines == [], f"{page.name}:{fence.line}"


def test_the_readme_has_a_whole_job() -> None:
    assert any(page.name == "README.md" for page, _ in WHOLE)


@pytest.mark.parametrize(("page", "fence"), PIECES, ids=_id)
def test_a_piece_fits_into_the_example(page: Page, fence: Fence) -> None:
    piece = _load(fence.text)
    if OF_OTHERS & set(piece):
        return
    place = next((place for place in PLACES if set(piece) <= _fields(place)), None)
    assert place is not None, f"{page.name}:{fence.line}: no section of a job has {', '.join(piece)}"
    try:
        parse_job(_put(_load((ROOT / "examples/chain-sum.yaml").read_text(encoding="utf-8")), piece, place=place))
    except UserErrors as errors:
        pytest.fail(f"{page.name}:{fence.line}: {'; '.join(errors.lines)}")


def _load(text: str) -> Any:
    return YAML(typ="safe").load(text)


def _fields(place: str) -> set[str]:
    section = schema_at(place) if place else {"properties": {"metadata": {}, "spec": {}}}
    return set((section or {}).get("properties", {}))


def _put(job: Any, piece: Any, *, place: str) -> Any:
    """The job with the piece in it: sections are joined, values below them replaced."""
    whole = deepcopy(job)
    if place.startswith("spec.generators[0]"):
        pool = whole["spec"]["generators"][0]
        pool.update({"engine": piece} if place.endswith("engine") else piece)
        return whole
    for part in reversed([part for part in place.split(".") if part]):
        piece = {part: piece}
    for key, value in piece.get("metadata", {}).items():
        whole["metadata"][key] = value
    for key, value in piece.get("spec", {}).items():
        joined = key in ("task", "trainer", "pipeline", "storage")
        whole["spec"][key] = {**whole["spec"].get(key, {}), **value} if joined else value
    for name in ("dataset", "format", "rewards") if "mixture" in whole["spec"]["task"] else ():
        del whole["spec"]["task"][name]  # each task of a mixture has its own
    return whole
