"""What is installed and what images are made of: by version and hash, told in a bill of materials, from nobody's name."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.tree import ROOT

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
DIGEST = f"sha256:{'a' * 64}"


def run(*command: str, cwd: Path = ROOT, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("BASE_IMAGE", "TORCH_BACKEND", "RELEASE")}
    return subprocess.run(
        command, cwd=cwd, env=kept | environ, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what `check_lock.py` reads."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    return tmp_path


def changed(path: Path, pattern: str, replacement: str) -> None:
    text = path.read_text()
    made, count = re.subn(pattern, replacement, text, count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(made)


def check(tree: Path) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(ROOT / "tools/check_lock.py"), cwd=tree)


def test_the_lock_follows_the_project(tree: Path) -> None:
    done = check(tree)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "pattern", "replacement", "told"),
    [
        ("pyproject.toml", r'^    "rich>=14,<16",', '    "rich>=14,<16", "nobody-has-it>=1",', "nobody-has-it>=1; got none"),
        ("pyproject.toml", r"pydantic>=2\.12,<3", "pydantic>=3,<4", "must have pydantic<4,>=3"),
        ("constraints.txt", r"^torch>=.*$", "torch>=9", "must have torch>=9"),
        ("requirements/build.in", r"^uv>=.*$", "uv>=9", "must have uv>=9"),
        ("requirements/dev.txt", r"^aiohttp==(.*) \\$", r"aiohttp==\1", "must be a package with its version and hashes"),
        ("requirements/dev.txt", r"^aiohttp==", "--index-url https://index.example/\naiohttp==", "got '--index-url"),
        ("requirements/operator.txt", r"(?s)(^aiohttp==.*?sha256:)[0-9a-f]", r"\1x", "must be a package with"),
        ("requirements/operator.txt", r"^aiohttp==", "aiohttp==9", "aiohttp must be as in dev.txt"),
    ],
)  # fmt: skip
def test_a_lock_that_does_not_is_told(tree: Path, file: str, pattern: str, replacement: str, told: str) -> None:
    changed(tree / file, pattern, replacement)
    done = check(tree)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_no_lock_names_an_index() -> None:
    assert len(LOCKS) == 6
    assert [path.name for path in LOCKS if "://" in path.read_text()] == []


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "BASE_IMAGE: must end with @sha256:DIGEST in a release; got ''"),
        ({"BASE_IMAGE": "python:3.12"}, "got 'python:3.12'"),
        ({"BASE_IMAGE": f"python@{DIGEST[:-1]}"}, "BASE_IMAGE: must end with"),
        ({"BASE_IMAGE": f"python@{DIGEST}x"}, "BASE_IMAGE: must end with"),
        ({"BASE_IMAGE": f"python@{DIGEST}", "TORCH_BACKEND": "cpu"}, "TORCH_BACKEND: must not be given in a release"),
    ],
)
def test_a_release_takes_nothing_that_may_change(environ: dict[str, str], told: str) -> None:
    done = run("tools/images.sh", "build", "operator", RELEASE="1", **environ)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_bill_of_materials_has_each_package_with_its_hashes(tmp_path: Path) -> None:
    done = run("tools/sbom.sh", "operator", PYTHON=sys.executable, SBOM_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    bill = json.loads((tmp_path / "streamrl-operator.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    listed = {f"{one['name']}=={one['version']}" for one in bill["components"]}
    locked = re.findall(r"^([a-z0-9][\w.-]*==[^ ]+)", (ROOT / "requirements/operator.txt").read_text(), re.MULTILINE)
    assert listed == set(locked)
    assert all(one["externalReferences"][0]["hashes"] for one in bill["components"])


@pytest.mark.parametrize("name", ["operator", "trainer", "generator"])
def test_an_image_installs_by_hash_alone(name: str) -> None:
    lines = (ROOT / f"Dockerfile.{name}").read_text().splitlines()
    assert all("--require-hashes" in line for line in lines if "pip install" in line and "uv pip" not in line)
    assert all("--no-deps" in line for line in lines if "uv pip install" in line)
    assert any(
        "tools/install.sh" in line and f"requirements/{'operator' if name == 'operator' else 'worker'}.txt" in line
        for line in lines
    )
    assert [line for line in lines if "://" in line] == []
