"""YAML of the texts: whole documents are valid, and pieces of a job name fields that exist."""

from pathlib import Path

import pytest
from streamrl.errors import UserErrors
from streamrl_cli.jobfile import check_file
from support.pages import Fence, Page, guides

OURS = ("kind: RLJob", "kind: RLJobDefaults", "kind: RLCluster")
BLOCKS = [(page, fence) for page in guides() for fence in page.fences if fence.language == "yaml"]
WHOLE = [
    (page, fence)
    for page, fence in BLOCKS
    if "apiVersion: streamrl.io/" in fence.text and any(kind in fence.text.splitlines() for kind in OURS)
]


def _id(value: object) -> str:
    return value.name if isinstance(value, Page) else str(value.line) if isinstance(value, Fence) else str(value)


@pytest.mark.parametrize(("page", "fence"), WHOLE, ids=_id)
def test_a_whole_document_is_valid(page: Page, fence: Fence, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(fence.text, encoding="utf-8")
    _, mistakes = check_file(path, beside=True)
    assert UserErrors(mistakes).lines == [], f"{page.name}:{fence.line}"


def test_the_readme_has_a_whole_job() -> None:
    assert any(page.name == "README.md" for page, _ in WHOLE)
