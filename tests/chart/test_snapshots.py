"""What the chart renders, as files to be read in a review. STREAMRL_UPDATE_SNAPSHOTS=1 writes them anew."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))


def _shortened(text: str) -> str:
    """Without the CRDs, the hooks' script and the dashboards, which stand elsewhere in the repository."""
    text = re.sub(r'\[python, -c, ".*", ', "[python, -c, <files/hooks.py>, ", text)
    text = re.sub(r'^(  (streamrl-\S+\.json): )".*"$', r"\1<files/dashboards/\2>", text, flags=re.MULTILINE)
    documents = text.split("\n---\n")
    return "\n---\n".join(one for one in documents if "kind: CustomResourceDefinition" not in one).rstrip() + "\n"


@pytest.mark.parametrize("case", CASES)
def test_snapshot(render: Callable[..., str], case: str) -> None:
    got = _shortened(render("--values", str(HERE / f"values/{case}.yaml")))
    file = HERE / f"snapshots/{case}.yaml"
    if os.environ.get("STREAMRL_UPDATE_SNAPSHOTS"):
        file.write_text(got)
    assert got == file.read_text(), (
        f"{file} is not what the chart renders; if it should be: STREAMRL_UPDATE_SNAPSHOTS=1"
    )
