"""Reasons are part of the public face: each in one table of the code, with a sentence. The docs are generated from it."""

import ast
from pathlib import Path

from streamrl_operator.planning.conditions import REASONS
from support.tree import ROOT

PACKAGE = ROOT / "operator/streamrl_operator"
SAID = {"Aspect", "JobEvent", "WaitingReason", "End", "_no", "warning"}
"""What takes a reason: by name, or first."""


def reasons(path: Path) -> set[str]:
    """Literal reasons in a file."""
    calls = [each for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(each, ast.Call)]
    found = set()
    for call in calls:
        if ast.unparse(call.func).rpartition(".")[2] in SAID:
            given = [key.value for key in call.keywords if key.arg == "reason"] + call.args[:1]
            found |= {each.value for arg in given for each in ast.walk(arg) if isinstance(each, ast.Constant)}
    return {each for each in found if isinstance(each, str) and each.isidentifier() and each[0].isupper()}


def test_every_reason_that_is_given_has_a_sentence() -> None:
    given = set().union(*(reasons(path) for path in PACKAGE.rglob("*.py")))
    assert len(given) > 20
    assert given - {"PodScheduled"} <= set(REASONS)
