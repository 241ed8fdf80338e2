"""Run inside an image: is it what docs/images.md promises? Usage: python -I - ROLE "MODULE, MODULE" [compiler] < check_image.py

Every failure is a line; the exit status says whether there was one.
"""

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

UID = 10001
COMPILER = ("cc", "gcc", "ld", "as")
"""Triton needs one when it runs."""
BUILD_TOOLS = ("cc", "gcc", "g++", "c++", "clang", "ld", "as", "make", "cmake", "cargo", "rustc", "go", "uv", "git")
HEAVY = ("torch", "transformers", "vllm", "numpy", "datasets")
"""The operator has none of these."""

PIP = re.compile(r"pip[0-9.]*")
"""As a program on PATH."""
PIP_MODULES = ("pip", "ensurepip")
BASE_PYTHON = Path(sys.base_prefix) / "bin/python3"
"""What the virtual environment is made of: modules of its own would not be seen from inside."""

OPERATOR_MB = 300
"""It may be so large, unpacked."""


def pips() -> list[str]:
    """Where pip is, as a program or as a module of the environment's Python or the base's."""
    folders = (Path(folder) for folder in os.get_exec_path())
    found = [str(path) for folder in folders for path in sorted(folder.glob("pip*")) if PIP.fullmatch(path.name)]
    ask = f"import importlib.util as u; print(*(s.origin for n in {PIP_MODULES} if (s := u.find_spec(n))), sep='\\n')"
    for python in (sys.executable, str(BASE_PYTHON)):
        answer = subprocess.run([python, "-I", "-c", ask], capture_output=True, text=True, timeout=60, check=True)
        found += answer.stdout.split()
    return sorted(set(found))


def size_mb() -> int:
    """Bytes of all files of the image, each counted once."""
    root = Path("/").stat().st_dev
    seen: dict[int, int] = {}
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.lstat(f"{folder}/{name}").st_dev == root]
        for stat in (os.lstat(f"{folder}/{name}") for name in files):
            if stat.st_dev == root:
                seen[stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values()) // 1_000_000


role, modules = sys.argv[1], sys.argv[2].split(", ")
wrong: list[str] = []
if os.getuid() != UID or os.getgid() != UID:
    wrong.append(f"user: must be {UID}:{UID}; got {os.getuid()}:{os.getgid()}")
needed = COMPILER if "compiler" in sys.argv[3:] else ()
wrong += [f"build tool: {path}" for name in BUILD_TOOLS if name not in needed and (path := shutil.which(name))]
wrong += [f"missing: {name}" for name in needed if shutil.which(name) is None]
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        wrong.append(f"import {name}: {error}")
if role == "operator":
    wrong += [f"heavy package: {name}" for name in HEAVY if importlib.util.find_spec(name)]
wrong += [f"pip: {path}" for path in pips()]
wrong += [f"writable: {path}" for path in (Path(sys.prefix), Path("/usr"), Path("/etc")) if os.access(path, os.W_OK)]
wrong += [f"environment: {name}" for name in os.environ if name.startswith(("PIP_", "UV_"))]
size = size_mb()
if role == "operator" and size >= OPERATOR_MB:
    wrong.append(f"size: must be less than {OPERATOR_MB} MB; got {size}")
sys.stdout.write(f"{role}: {size} MB, user {os.getuid()}, imports {', '.join(modules)}\n")
for line in wrong:
    sys.stdout.write(f"{role}: {line}\n")
sys.exit(bool(wrong))
