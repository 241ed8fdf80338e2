"""A file with hundreds of mistakes: each place that shows them shows the first, and says how many there are."""

import json
from pathlib import Path

import pytest

from streamrl.errors import MOST_LINES
from streamrl_operator.observe import validated
from support.command import streamrl
from support.jobs import simulated_job

UNKNOWN = 300


@pytest.fixture
def job(tmp_path: Path) -> Path:
    document = simulated_job()
    document["spec"] |= {f"k{number}": 1 for number in range(UNKNOWN)}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("command", ["validate", "run", "plan", "submit", "profile"])
def test_a_command_shows_the_first_mistakes_and_their_number(
    command: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = streamrl(capsys, command, str(job))
    assert (outcome.code, outcome.out, len(outcome.err)) == (2, [], MOST_LINES + 1)
    assert all(": is not a known field" in line for line in outcome.err[:-1])
    assert outcome.err[-1] == f"and {UNKNOWN - MOST_LINES} more"


def test_so_does_the_operator(job: Path) -> None:
    _, invalid = validated(json.loads(job.read_text()))
    assert invalid.split("\n")[-1] == f"and {UNKNOWN - MOST_LINES} more"
    assert invalid.count("\n") == MOST_LINES
