"""How the product is cut: folders that a reader can take in, one meaning a class, no circles."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from architecture.not_yet import CIRCLES, LARGE_FOLDERS, MOST_SHORT, TWO_MEANINGS
from support.public_names import classes
from support.tree import PACKAGES, ROOT, sources, syntax

MOST_MODULES = 15
"""Of a folder, its `__init__.py` aside."""
SHORT_LINES = 70


def test_every_class_has_a_name_of_its_own() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, place in classes():
        found[name].append(place)
    assert {name: places for name, places in found.items() if len(places) > 1 and name not in TWO_MEANINGS} == {}


def test_no_folder_is_too_large() -> None:
    sizes: defaultdict[str, int] = defaultdict(int)
    for path in sources(*PACKAGES):
        sizes[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    assert {at: size for at, size in sizes.items() if size > MOST_MODULES and at not in LARGE_FOLDERS} == {}


def test_few_modules_of_the_workers_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources("workers/streamrl_workers")}
    modules = {path: lines for path, lines in lengths.items() if path.name != "__init__.py"}
    short = [path for path, lines in modules.items() if lines < SHORT_LINES]
    assert len(short) <= MOST_SHORT * len(modules), f"{len(short)} of {len(modules)}"


def test_folders_do_not_import_in_circles() -> None:
    assert [circle for circle in circles() if not CIRCLES.issuperset(circle)] == []


def circles() -> list[tuple[str, ...]]:
    """Folders and modules beside each other that reach each other by imports; of modules alone Python itself complains."""
    files = {_dotted(path): path for path in sources(*PACKAGES)}
    beside: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in files.items():
        for target in _imported(path, known=files):
            for one, other in _siblings(module, target):
                beside[one].add(other)
    folders = {_dotted(path.parent) for path in files.values()}
    return [circle for circle in _circles(beside) if folders & set(circle)]


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
