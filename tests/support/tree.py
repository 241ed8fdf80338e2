"""The repository's own files, for tests about the house itself."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "crds/streamrl",
    "pages/streamrl_pages",
    "operator/streamrl_operator",
    "workers/streamrl_workers",
    "cli/streamrl_cli",
)
"""Where what is shipped lies."""


def sources(*folders: str) -> list[Path]:
    """Python files written by people below `folders`."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if not path.stem.endswith("_pb2")]


def all_sources() -> list[Path]:
    """Every Python file written by people."""
    return sources(*PACKAGES, "tools", "tests", "benchmarks", "examples")


def syntax(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_bytes(), filename=str(path))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """(last name, call) for every call in a file: `asyncio.create_task(...)` is `create_task`."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", None) or getattr(node.func, "id", ""), node


def place(path: Path, line: int) -> str:
    """`file:line`, from the root."""
    return f"{path.relative_to(ROOT)}:{line}"


def python(code: str, *arguments: str) -> str:
    """Run `code` in a new interpreter that sees nothing of the environment; returns its output."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
