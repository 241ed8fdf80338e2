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
        ("pyproject.toml", r"mkdocs-material>=9\.8,<10", "mkdocs-material>=99", "must have mkdocs-material>=99"),
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
    assert len(LOCKS) == 8
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
    assert [line for line in lines if "://" in line] == []
    told = dict(line.removeprefix("ARG ").split("=", 1) for line in lines if line.startswith("ARG LOCK="))
    for vllm in ("", "gpu", "cpu") if name == "generator" else ("",):
        lock = shell(f"echo {told.get('LOCK', '')}", VLLM=vllm).strip()
        (installed,) = (line for line in stages(name)["dependencies"][1] if "tools/install.sh /opt" in line)
        file = installed.replace("${LOCK}", lock).rpartition(" ")[2]
        assert file == f"requirements/{'operator' if name == 'operator' else f'vllm-{vllm}' if vllm else 'worker'}.txt"
        assert (ROOT / file).exists()


def shell(script: str, **environ: str) -> str:
    """What a script prints."""
    done = run("sh", "-c", script, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stages(name: str) -> dict[str, tuple[str, list[str]]]:
    """Stage -> (what it is from, its instructions without comments); the last one is ""."""
    found: dict[str, tuple[str, list[str]]] = {}
    text = (ROOT / f"Dockerfile.{name}").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.startswith("FROM "):
            _, parent, *rest = line.split()
            found[rest[1] if rest else ""] = (parent, current := [])
        elif found and line and not line.startswith("#"):
            current.append(line)
    return found


@pytest.mark.parametrize("name", ["operator", "trainer", "generator"])
def test_no_stage_is_named_by_an_argument(name: str) -> None:
    """buildah 1.28 (Debian 12) leaves out a stage that only an argument's default names, and then misses it."""
    assert {parent for parent, _ in stages(name).values() if "$" in parent} == {"${BASE_IMAGE}"}


def chain(found: dict[str, tuple[str, list[str]]], stage: str) -> list[str]:
    """All instructions of a stage, those that it is from first."""
    parent, lines = found[stage]
    return [*(chain(found, parent) if parent in found else []), *lines]


@pytest.mark.parametrize("name", ["operator", "trainer", "generator"])
def test_code_and_dependencies_are_layers_of_their_own(name: str) -> None:
    """A change of code reaches neither the stage nor the layer of the dependencies."""
    found = stages(name)
    copied = [line for line in chain(found, "dependencies") if line.startswith(("COPY", "ADD"))]
    assert all(line.split()[1].startswith(("requirements/", "tools/install.sh")) for line in copied), copied
    last = [line for line in found[""][1] if line.startswith("COPY")]
    assert last == ["COPY --from=dependencies /opt/venv /opt/venv", "COPY --from=code /opt/code /opt/venv"]
    assert not any("/opt/venv" in line and "--prefix /opt/code" not in line for line in found["code"][1])


def test_both_worker_images_share_their_layers() -> None:
    trainer, generator = stages("trainer"), stages("generator")
    for stage in ("build", "dependencies", "code"):
        assert chain(trainer, stage) == chain(generator, stage), stage
    through = trainer[""][1].index("COPY --from=dependencies /opt/venv /opt/venv") + 1
    assert trainer[""][1][:through] == generator[""][1][:through]


def test_a_compiler_is_where_triton_needs_one_and_nowhere_else(tmp_path: Path) -> None:
    apt = tmp_path / "apt-get"
    apt.write_text('#!/bin/sh\necho "$*"\n')
    apt.chmod(0o755)
    last = {name: [line for line in stages(name)[""][1] if "apt-get" in line] for name in ("operator", "trainer", "generator")}  # fmt: skip
    assert (last["operator"], last["trainer"]) == ([], [])
    (install,) = last["generator"]
    script = install.removeprefix("RUN ").replace(" /var/", f" {tmp_path}/")
    path = f"{tmp_path}:{os.environ['PATH']}"
    said = {lock: shell(script, LOCK=lock, PATH=path) for lock in ("worker", "vllm-cpu", "vllm-gpu")}
    assert said["worker"] == ""
    assert "libnuma1" in said["vllm-cpu"]
    assert ["gcc" in text for text in said.values()] == [False, False, True]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"VLLM": "tpu"}, "VLLM: must be none, gpu or cpu; got 'tpu'"),
        ({"VLLM": "gpu", "TORCH_BACKEND": "cpu"}, "TORCH_BACKEND: must not be given with VLLM=gpu"),
    ],
)
def test_what_vllm_an_image_has_is_checked_first(environ: dict[str, str], told: str) -> None:
    done = run("tools/images.sh", "build", "generator", **environ)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
