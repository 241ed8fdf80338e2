"""Scenario files: what is wrong is one line, with its place."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError, UserErrors
from streamrl_cli.simulation.reading import parse_scenario, read_rows, read_scenario

Plain = Callable[..., dict[str, Any]]
ROOT = Path(__file__).parents[4]

MISTAKES = [
    ({"pools": []}, "pools: must be a list of 1 to 64 items, got []"),
    ({"pool": {"slot": 3}}, "pools[0].slot: is not a known field; did you mean slots?"),
    ({"pool": {"slots": 0}}, "pools[0].slots: must be a whole number from 1 to 65536, got 0"),
    ({"pool": {"bandwidth": "fast"}}, "pools[0].bandwidth: must be a byte quantity (such as 64Mi) of at most 16"),
    ({"pool": {"startSeconds": None}}, "pools[0].startSeconds: must be a number from 0 to 86400, got null; give a"),
    ({"groupSize": 1}, "groupSize: must be a whole number from 2 to 1024, got 1"),
    ({"groupSize": "8"}, "groupSize: must be a whole number from 2 to 1024, got '8'"),
    ({"lengths": {}}, "lengths: needs exactly one of logNormal, quantiles, table, file; got none"),
    ({"lengths": {"logNormal": {}}}, "lengths.logNormal.medianTokens: is required; give a number from 1 to"),
    ({"lengths": {"table": {"rows": [[0]]}}}, "lengths.table.rows[0][0]: must be a whole number from 1 to"),
    (
        {"lengths": {"quantiles": {"points": [{"percent": 0, "tokens": 1}, {"percent": 90, "tokens": 2}]}}},
        "lengths.quantiles: points must rise from percent 0 to percent 100, got [0.0, 90.0]",
    ),
    (
        {"lengths": {"quantiles": {"points": [{"percent": 0, "tokens": 3}, {"percent": 100, "tokens": 2}]}}},
        "lengths.quantiles: tokens of points must not fall, got [3, 2]",
    ),
    (
        {"lengths": {"table": {"rows": [[1]]}, "growth": [{"step": 3, "factor": 1}, {"step": 3, "factor": 2}]}},
        "lengths: growth must be given by rising step, got [3, 3]",
    ),
    ({"pipeline": {"mode": "Sync"}}, "pipeline.mode: must be one of Colocated, Batch, StreamSync, StreamAsync, got"),
    ({"pipeline": {"maxStalenessSteps": 2}}, "pipeline: maxStalenessSteps must be 0 (or absent) with mode StreamSync"),
    ({"scheduling": {"dispatch": {"random": {}}}}, "scheduling.dispatch.random: is not a known field; known: fifo"),
    ({"pool": {"scaling": {"auto": {}}}}, "pools[0].scaling.auto.maxReplicas: is required"),
    (
        {"pool": {"latency": [{"batch": 2, "milliseconds": 1}, {"batch": 1, "milliseconds": 2}]}},
        "pools[0]: latency must be given by rising batch, got [2, 1]",
    ),
    (
        {"pool": {"latency": [{"batch": 1, "milliseconds": 2}, {"batch": 2, "milliseconds": 1}]}},
        "pools[0]: milliseconds must not fall with the batch, got [2.0, 1.0]",
    ),
    ({"events": [{"atSeconds": 1}]}, "events[0]: needs exactly one of kill, leave, restartTrainer; got none"),
    (
        {"events": [{"atSeconds": 1, "kill": {"generator": "generator-q-0"}}]},
        "(document): generator of an event must be generator-POOL-N of p, got generator-q-0",
    ),
    (
        {"scheduling": {"dispatch": {"python": {"class": "own:Mine"}}}},
        "(document): scheduling.dispatch.python must be absent: a simulation runs no code of the user",
    ),
    ({"ranker": {"recallPercent": 10}}, "ranker.recallPercent: must be a number from 20 to 100, got 10"),
]


@pytest.mark.parametrize(("changes", "line"), MISTAKES)
def test_a_mistake_is_one_line(plain: Plain, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserErrors) as caught:
        parse_scenario(plain(**changes))
    assert [str(error)[: len(line)] for error in caught.value.errors] == [line]


def test_two_pools_of_one_name_are_refused(plain: Plain) -> None:
    document = plain()
    document["pools"] *= 2
    with pytest.raises(UserErrors, match="names of pools must differ, got p, p"):
        parse_scenario(document)


@pytest.mark.parametrize("data", [None, 3, ["a"]])
def test_what_is_no_mapping_is_no_scenario(data: object) -> None:
    with pytest.raises(UserErrors, match="must be a mapping with pipeline, pools, lengths"):
        parse_scenario(data)


def test_a_mistake_in_a_file_has_its_line(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "pipeline: {batchGroups: 1, steps: 1}\nlengths: {logNormal: {medianTokens: 9}}\nseed: -1\npool: []\n"
    )
    with pytest.raises(UserErrors) as caught:
        read_scenario(path)
    assert [str(error).removeprefix(str(path)).split(";")[0] for error in caught.value.errors] == [
        ":3: seed: must be a whole number from 0 to 2147483647, got -1",
        ":4: pool: is not a known field",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "must hold one scenario, holds 0"),
        ("a: 1\n---\nb: 1\n", "must hold one scenario, holds 2"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_file_holds_one_scenario(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=line):
        read_scenario(path)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file or directory; check the path"):
        read_scenario(tmp_path / "none.yaml")


def test_rows_of_lengths_come_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("[3, 4]\n\n[5]\n")
    assert read_rows(path) == ((3, 4), (5,))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[1]\n{}\n", ":2: must be a list of whole numbers from 1 to 1048576, got {}"),
        ("[1, 0]\n", ":1: must be a list"),
        ("[true]\n", ":1: must be a list"),
        ("[]\n", ":1: must be a list"),
        ("1, 2\n", ":1: must be a list"),
        ("\n", ": holds no lengths"),
    ],
)
def test_a_row_that_is_no_list_of_lengths_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_rows(path)
    assert str(caught.value).removeprefix(str(path)).startswith(line)


@pytest.mark.parametrize("path", sorted((ROOT / "examples/simulations").glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_scenarios(path: Path) -> None:
    assert read_scenario(path).pools
