"""Rules about the files themselves: names, lengths of functions, what must not stand in them."""

import ast
import re
import sys
from pathlib import Path

from support.tree import PACKAGES, ROOT, all_sources, calls, place, sources, syntax

LONGEST_FUNCTION = 80
LEFT_OVER = re.compile(r"\b(TODO|FIXME|XXX|raise NotImplementedError)\b")
NOT_RUN = re.compile(r"pytest\.(skip|xfail)|mark\.(skip|skipif|xfail|flaky)|importorskip|\breruns\b")
MAY_LACK = ("tests/chart/conftest.py", "tests/cluster/conftest.py", "tests/cluster/node_fixtures.py")
"""Here programs may be missing on a reader's machine; STREAMRL_REQUIRE, which our own targets set, makes that a failure."""


def test_no_function_is_too_long() -> None:
    functions = [
        (place(path, node.lineno), node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in all_sources()
        for node in ast.walk(syntax(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [found for found in functions if found[2] > LONGEST_FUNCTION] == []


def test_nothing_is_left_over() -> None:
    this = ROOT / "tests/architecture/test_tree.py"
    found = [
        place(path, number)
        for path in all_sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if path != this and (LEFT_OVER.search(line) or (NOT_RUN.search(line) and not may_lack(path)))
    ]
    assert found == []


def may_lack(path: Path) -> bool:
    """Whether tests may be left out here, for want of a program, unless it is required."""
    return str(path.relative_to(ROOT)) in MAY_LACK and "STREAMRL_REQUIRE" in path.read_text(encoding="utf-8")


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    names = {path: path.stem for path in sources(*PACKAGES)}
    assert [place(path, 1) for path, name in names.items() if name in sys.stdlib_module_names] == []


def test_every_module_says_what_it_owns() -> None:
    assert [place(path, 1) for path in sources(*PACKAGES, "tools") if not ast.get_docstring(syntax(path))] == []


def test_operator_is_no_package() -> None:
    assert not (ROOT / "operator/__init__.py").exists()  # `make` checks it too, before pytest starts


def test_every_task_has_a_name() -> None:
    nameless = [
        place(path, call.lineno)
        for path in sources(*PACKAGES)
        for name, call in calls(path)
        if name in ("create_task", "ensure_future") and not any(keyword.arg == "name" for keyword in call.keywords)
    ]
    assert nameless == []


def test_every_queue_is_bounded() -> None:
    unbounded = [
        place(path, call.lineno)
        for path in sources(*PACKAGES)
        for name, call in calls(path)
        if name in ("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue") and not (call.args or call.keywords)
    ]
    assert unbounded == []


def test_packages_are_typed() -> None:
    assert [package for package in PACKAGES if not (ROOT / package / "py.typed").exists()] == []


def test_text_leaves_by_one_door() -> None:
    """`streamrl.text` takes out what a terminal acts on; ruff refuses `print` besides."""
    leaves = re.compile(r"sys\.(stdout|stderr)\.write\(|file=sys\.(stdout|stderr)|logging\.basicConfig\(")
    doors = ("crds/streamrl/text.py", "operator/streamrl_operator/main.py")
    found = [
        place(path, number)
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if leaves.search(line) and str(path.relative_to(ROOT)) not in doors
    ]
    assert found == []


def test_every_file_that_a_text_names_is_there() -> None:
    files = [str(path.relative_to(ROOT)) for path in all_sources()]
    named = re.compile(r"`((?:[\w.-]+/)+\w+\.py|[\w./-]*\btest_\w+\.py)\b")
    gone = [
        (place(text, number), name)
        for text in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        if text.name != "CHANGELOG.md"
        for number, line in enumerate(text.read_text(encoding="utf-8").splitlines(), start=1)
        for name in named.findall(line)
        if not any(f"/{file}".endswith(f"/{name}") for file in files)
    ]
    assert gone == []
