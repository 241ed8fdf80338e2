"""How the product is cut: few short modules, no circles."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from architecture.not_yet import MOST_SHORT
from support.tree import PACKAGES, ROOT, sources, syntax

SHORT_LINES = 70


def test_few_modules_of_the_workers_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources("workers/streamrl_workers")}
    modules = {path: lines for path, lines in lengths.items() if path.name != "__init__.py"}
    short = [path for path, lines in modules.items() if lines < SHORT_LINES]
    assert len(short) <= MOST_SHORT * len(modules), f"{len(short)} of {len(modules)}"


def test_modules_do_not_import_in_circles() -> None:
    """Imports for types and those inside functions count as well: a reader follows them all."""
    assert list(_circles({module: targets - {module} for module, targets in _imports().items()})) == []


def test_folders_do_not_import_in_circles() -> None:
    """Folders and modules beside each other."""
    beside: defaultdict[str, set[str]] = defaultdict(set)
    for module, targets in _imports().items():
        for target in targets:
            for one, other in _siblings(module, target):
                beside[one].add(other)
    assert list(_circles(beside)) == []


@cache
def _imports() -> dict[str, set[str]]:
    """Module of the product -> modules of the product that it imports."""
    files = {_dotted(path): path for path in sources(*PACKAGES)}
    return {module: set(_imported(path, known=files)) & files.keys() for module, path in files.items()}


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path, *, known: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the product that a file imports, wherever in it; an entry point that is started by its name is none."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in inner)


def _siblings(module: str, target: str) -> Iterator[tuple[str, str]]:
    """Where the ways to the two part: the two folders or modules that stand beside each other."""
    ours, theirs = module.split("."), target.split(".")
    for depth, (one, other) in enumerate(zip(ours, theirs, strict=False), start=1):
        if one != other:
            yield ".".join(ours[:depth]), ".".join(theirs[:depth])
            return


def _circles(beside: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Groups in which each reaches each."""
    reached = {start: _reached(start, beside) for start in beside}
    seen: set[str] = set()
    for start in sorted(reached):
        circle = {other for other in reached[start] if start in reached.get(other, ())}
        if circle and start not in seen:
            seen |= circle
            yield tuple(sorted(circle))


def _reached(start: str, beside: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(beside.get(start, ()))
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += beside.get(one, ())
    return found
