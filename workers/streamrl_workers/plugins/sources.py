"""Where the user's modules lie, which others they import, and a fingerprint of their code. Parses them, and imports none."""

import ast
import hashlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from streamrl.spec import RLJobSpec
from streamrl_workers.plugins.kinds import plugins_of


def syntax_tree(source: bytes, *, name: str = "<unknown>") -> ast.Module:
    """Parse a module of the user without running it; `name` is its file's. Raises `ValueError`: it is not Python, or is nested too deep."""
    try:
        with warnings.catch_warnings(action="ignore"):  # they would show its lines
            return ast.parse(source, filename=name)
    except SyntaxError as error:
        raise ValueError(str(error)) from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deep") from None


def source_file(base: Path) -> Path | None:
    """Find the source of the module, or package, whose path without a suffix is `base`."""
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def module_file(module: str) -> Path | None:
    """Find the source of an installed module. None: there is none."""
    top, *parts = module.split(".")
    installed = importlib.util.find_spec(top)
    if installed is None:
        return None
    if installed.submodule_search_locations is not None:  # a package, perhaps without a file of its own
        roots = [Path(place) for place in installed.submodule_search_locations]
    else:
        roots = [Path(installed.origin).with_suffix("")] if installed.origin else []
    return next(filter(None, (source_file(root.joinpath(*parts)) for root in roots)), None)


def local_modules(names: Iterable[str], directory: Path) -> dict[str, Path]:
    """Find the modules of these names in `directory`, and those there that they import: name -> file, or directory of a package."""
    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        if (path := _local_module(name, directory)) is not None:
            found[name] = path
            waiting.extend(imported for file in _sources(path) for imported in _imports(file.read_bytes()))
    return found


def _local_module(name: str, directory: Path) -> Path | None:
    file, package = directory / f"{name}.py", directory / name
    if file.is_file():
        return file
    if any(package.glob("*.py")):
        return package
    # An installed package goes before a directory without a file of its own: `datasets/` beside the job is most often data.
    return package if _sources(package) and importlib.util.find_spec(name) is None else None


def _sources(path: Path) -> list[Path]:
    """Return the Python files of a module: the file, or those in the directory of a package."""
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def _imports(source: bytes) -> Iterator[str]:
    """Yield the top-level names of the modules that a module imports, anywhere in it."""
    try:
        tree = syntax_tree(source)
    except ValueError:  # whoever imports it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


def code_fingerprint(spec: RLJobSpec, *, directory: Path | None) -> dict[str, str]:
    """Hash the code of each plug-in of a job that is no part of StreamRL, by the field that names it.

    The code is that of the class's module, and of the modules in `directory` that it imports. What else is installed is not seen.
    """
    return {
        plugin.field: _code(plugin.place.partition(":")[0], directory=directory)
        for plugin in plugins_of(spec)
        if not plugin.is_shipped
    }


def _code(module: str, *, directory: Path | None) -> str:
    local = {} if directory is None else local_modules([module.partition(".")[0]], directory)
    installed = None if local else module_file(module)
    files = {module: installed} if installed is not None else dict(sorted(local.items()))
    digest = hashlib.sha256()
    for name, path in files.items():
        for file in _sources(path):
            digest.update(
                f"{name}/{file.relative_to(path)}".encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest()
            )
    return f"code of {', '.join(files) or module}, sha256 {digest.hexdigest()}"
