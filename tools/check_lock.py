"""Do the locked requirements follow pyproject.toml? Reads files alone: a new release on the index changes nothing. Usage: check_lock.py

Each requirement and constraint is met by the locked version; each package has its version and hashes; the images' locks are parts of
dev.txt; no file names an index. Every failure is a line; the exit status says whether there was one.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path("requirements")
FIX = "run `make lock` and commit requirements/"
_PINNED = re.compile(
    r"^([a-z0-9][a-z0-9._-]*)==(\S+)(?: ; [^\\]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def locked(name: str) -> dict[str, tuple[str, str]]:
    """Package -> (version, hashes)."""
    return {found[1]: (found[2], found[3]) for found in _PINNED.finditer((FOLDER / name).read_text(encoding="utf-8"))}


def unmet(wanted: Iterable[str], *, lock: str) -> Iterator[str]:
    """What a lock does not meet."""
    have = locked(lock)
    for line in wanted:
        requirement = Requirement(line)
        version, _ = have.get(canonicalize_name(requirement.name), (None, ""))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{FOLDER / lock}: must have {requirement}; got {version or 'none'}; {FIX}"


def odd_lines(path: Path) -> Iterator[str]:
    """Lines that are neither comments nor packages with hashes."""
    rest = _PINNED.sub("", path.read_text(encoding="utf-8"))
    for line in rest.splitlines():
        if line and not line.startswith("#"):
            yield f"{path}: must be a package with its version and hashes; got {line!r}; {FIX}"


def _lines(path: Path) -> list[str]:
    return [line for raw in path.read_text(encoding="utf-8").splitlines() if (line := raw.partition("#")[0].strip())]


def problems() -> Iterator[str]:
    """A line for each mistake."""
    whole = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    project = whole["project"]
    extras = project["optional-dependencies"]
    worker = [*project["dependencies"], *extras["worker"], *extras["stores"], *extras["tracing"]]
    everything = [
        *project["dependencies"],
        *(
            line
            for name in ("worker", "operator", "ui", "stores", "tracing", "trackers", "dev")
            for line in extras[name]
        ),
    ]
    yield from unmet([*everything, *_lines(Path("constraints.txt"))], lock="dev.txt")
    yield from unmet([*worker, *extras["vllm"]], lock="vllm-gpu.txt")
    yield from unmet([*everything, *_lines(FOLDER / "vllm-cpu.in")], lock="vllm-cpu.txt")
    yield from unmet(_lines(FOLDER / "build.in"), lock="build.txt")
    yield from unmet([*worker, *extras["trackers"]], lock="worker.txt")
    yield from unmet([*project["dependencies"], *extras["operator"]], lock="operator.txt")
    for group, lines in whole["dependency-groups"].items():
        yield from unmet(lines, lock=f"{group}.txt")
    dev = locked("dev.txt")
    for lock in ("worker.txt", "operator.txt"):
        for name, pin in locked(lock).items():
            if dev.get(name) != pin:
                yield f"{FOLDER / lock}: {name} must be as in dev.txt; got {pin[0]}; {FIX}"
    for path in sorted(FOLDER.glob("*.txt")):
        yield from odd_lines(path)


if __name__ == "__main__":
    wrong = list(problems())
    sys.stderr.writelines(f"{line}\n" for line in wrong)
    sys.exit(bool(wrong))
