"""`streamrl simulate`: files and lines."""

import argparse
import json
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl_cli import simulate

SCENARIO = """
seed: 1
groupSize: 2
pipeline: {batchGroups: 2, steps: 4}
pools:
- {name: p, slots: 2, latency: [{batch: 1, milliseconds: 10}]}
lengths: {file: {path: rows.jsonl}}
trainer: {secondsPerStep: 0.5}
"""


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    return simulate.run(parser.parse_args(argv))


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("[10, 20]\n[30, 40]\n")
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return path


def test_it_shows_the_numbers(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(scenario)) == 0
    text = capsys.readouterr().out
    assert "samples/s" in text
    assert "sample events/s" in text
    shares = {line.split()[0]: line for line in text.splitlines() if line}
    assert "%" in shares["p"]
    assert "%" in shares["trainer"]


def test_files_hold_the_same_twice(scenario: Path, tmp_path: Path) -> None:
    for number in (1, 2):
        files = [f"--{kind}={tmp_path / f'{kind}-{number}'}" for kind in ("json", "trace", "plot")]
        assert run(str(scenario), *files) == 0
    found = json.loads((tmp_path / "json-1").read_text())
    assert (found["steps"], found["samples"], found["tokens"]) == (4, 16, 400)
    for kind in ("json", "trace", "plot"):
        assert (tmp_path / f"{kind}-1").read_bytes() == (tmp_path / f"{kind}-2").read_bytes()
    assert "Plotly.react" in (tmp_path / "plot-1").read_text()


@pytest.mark.parametrize("seed", ["-1", str(2**31)])
def test_a_seed_out_of_bounds_is_one_line(scenario: Path, seed: str) -> None:
    with pytest.raises(UserError, match=f"--seed: must be from 0 to 2147483647, got {seed}"):
        run(str(scenario), f"--seed={seed}")


def test_a_file_of_lengths_that_is_not_there_is_one_line(scenario: Path) -> None:
    (scenario.parent / "rows.jsonl").unlink()
    with pytest.raises(UserError, match=r"rows\.jsonl: cannot be read: No such file or directory"):
        run(str(scenario))
