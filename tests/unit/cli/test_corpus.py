"""The corpus of job files through the door that users take: `streamrl validate`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import streamrl
from support.tree import ROOT

CORPUS = ROOT / "tests/corpus"
GOOD = sorted(path for path in (CORPUS / "good").iterdir() if path.name.endswith((".yaml", "tabs.json")))
GOOD += sorted(set((ROOT / "examples").glob("*.yaml")) - {ROOT / "examples/distillation.yaml"})  # needs its teacher
GOOD.append(ROOT / "examples/agents/coding.yaml")  # apples.yaml needs what apples_model.py makes
BAD = sorted((CORPUS / "bad").glob("*.yaml"))
EXPECTED = re.compile(r"^# expect: (.*)$", re.MULTILINE)
WARNINGS = re.compile(r"^# warning: (.*)$", re.MULTILINE)


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN_JUDGE", "a token that a good file names")


def expected_lines(path: Path) -> list[str]:
    text = path.read_bytes().decode("utf-8", errors="replace")
    return [expected.replace("<dir>", str(path.parent)) for expected in EXPECTED.findall(text)]


def test_corpus_is_large_enough() -> None:
    assert len(BAD) >= 60


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.name)
def test_good_files_pass(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "validate", str(path))
    warnings = [f"warning: {path}: {line}" for line in WARNINGS.findall(path.read_text(encoding="utf-8"))]
    assert (outcome.code, outcome.err) == (0, warnings)
    assert outcome.out[0].startswith(f"{path}: OK (")


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.name)
def test_bad_files_fail_with_these_lines(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "validate", str(path))
    assert (outcome.code, outcome.out) == (2, [])
    assert [line.removeprefix(f"{path}:").strip() for line in outcome.err] == expected_lines(path)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.name)
def test_spec_only_leaves_this_machine_out(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "validate", "--spec-only", str(path))
    assert outcome.code == (0 if b"# spec-only: OK" in path.read_bytes() else 2)


def test_several_files_are_all_checked(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = streamrl(capsys, "validate", str(BAD[2]), str(GOOD[0]), str(CORPUS / "absent.yaml"))
    assert outcome.code == 2
    assert len(outcome.out) == 1
    assert outcome.err[-1] == f"{CORPUS}/absent.yaml: cannot be read: No such file or directory; check the path"


def test_the_installed_command_says_the_same() -> None:
    command = [
        Path(sys.executable).with_name("streamrl"),
        "validate",
        CORPUS / "bad/steps-zero.yaml",
        CORPUS / "good/minimal.yaml",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == f"{CORPUS}/good/minimal.yaml: OK (minimal)\n"
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
