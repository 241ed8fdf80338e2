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
    if installed is None or installed.origin is None:
        return None
    origin = Path(installed.origin)
    root = origin.parent if origin.name == "__init__.py" else origin.with_suffix("")
    return source_file(root.joinpath(*parts))


def local_modules(names: Iterable[str], directory: Path) -> dict[str, Path]:
    """Find the modules of these names in `directory`, and those there that they import: name -> file, or directory of a package."""
    found: dict[str, Path] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        file, package = directory / f"{name}.py", directory / name
        if name in found:
            continue
        if file.is_file():
            found[name] = file
            waiting.extend(_imports(file.read_bytes()))
        elif any(package.glob("*.py")):
            found[name] = package
    return found


def _imports(source: bytes) -> Iterator[str]:
    """Top-level names of the modules that a module imports, anywhere in it."""
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
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(
                f"{name}/{file.relative_to(path)}".encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest()
            )
    return f"code of {', '.join(files) or module}, sha256 {digest.hexdigest()}"
