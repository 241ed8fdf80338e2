"""profile.json: written, read back, and refused in one line for each mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import UserError, UserErrors
from streamrl.spec import parse_job
from streamrl_cli.profiling.record import Profile, model_of, read_profile, write_profile
from support.jobs import simulated_job


def document(**changes: Any) -> dict[str, Any]:
    """A profile as its file holds it."""
    pool = {
        "name": "sim",
        "engine": "simulated",
        "latency": [
            {"batch": 1, "milliseconds": 1.0, "lowestMilliseconds": 0.9, "highestMilliseconds": 1.1, "steps": 80},
            {"batch": 8, "milliseconds": 2.0, "lowestMilliseconds": 1.9, "highestMilliseconds": 2.2, "steps": 80},
        ],
        "fillMilliseconds": 0.5,
        "lengths": {"tokens": [10, 20, 30]},
    }
    point = {"samples": 16, "tokens": 320, "seconds": 0.2, "lowestSeconds": 0.1, "highestSeconds": 0.3, "repeats": 3}
    trainer = {"engine": "simulated", "points": [{"processes": 1, **point}]}
    return {"version": 1, "job": "simulated", "model": {}, "pools": [pool], "trainer": trainer, **changes}


def profile(**changes: Any) -> Profile:
    return Profile.model_validate_json(json.dumps(document(**changes)))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path=path)
    assert read_profile(path) == profile()
    assert json.loads(path.read_text())["pools"][0]["latency"][1]["milliseconds"] == 2.0


def test_the_curve_and_the_lengths_of_a_pool() -> None:
    pool = profile().pool("sim")
    assert pool is not None
    assert pool.curve.at(8) == pytest.approx(0.002)
    assert pool.lengths.mean_tokens == 20
    assert profile().pool("other") is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"version": 2}, "version: must be 1: it is of another version of streamrl"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"trainer": {"engine": "torch", "points": []}}, "trainer.points: Tuple should have at least 1 item"),
        (
            {"pools": [document()["pools"][0] | {"latency": document()["pools"][0]["latency"][::-1]}]},
            "pools[0]: latency must be given by rising batch, got [8, 1]",
        ),
        ({"pools": [document()["pools"][0]] * 2}, "names of pools must differ, got sim, sim"),
        (
            {"pools": [document()["pools"][0] | {"fillMilliseconds": -1}]},
            "pools[0].fillMilliseconds: Input should be greater than or equal to 0",
        ),
        (
            {"pools": [document()["pools"][0] | {"fillMilliseconds": float("inf")}]},
            "pools[0].fillMilliseconds: Input should be a finite number",
        ),
    ],
)
def test_each_mistake_is_one_line_with_its_place_and_what_to_do(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document(**changes)))
    with pytest.raises(UserErrors) as caught:
        read_profile(path)
    (mistake,) = caught.value.errors
    text = str(mistake)
    assert text.startswith(f"{path}: {line}")
    assert text.endswith(f"; measure again: streamrl profile JOB.yaml --out {path}")
    assert "\n" not in text


@pytest.mark.parametrize(("text", "rule"), [("{", "is not JSON: "), ("", "is not JSON: ")])
def test_a_file_that_is_no_json(tmp_path: Path, text: str, rule: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UserErrors) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"{path}: {rule}")


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file or directory"):
        read_profile(tmp_path / "absent.json")


def test_a_part_that_is_measured_again_takes_the_others_place() -> None:
    known = profile()
    trainer_alone = profile(pools=[])
    pools_alone = Profile.model_validate_json(json.dumps({**document(), "trainer": None}))
    assert pools_alone.with_part(trainer_alone) == known
    other = document()["pools"][0] | {"name": "other", "fillMilliseconds": 9.0}
    both = known.with_part(profile(pools=[other]))
    assert [pool.name for pool in both.pools] == ["sim", "other"]
    again = both.with_part(profile(pools=[other | {"fillMilliseconds": 1.0}]))
    assert [pool.fill_milliseconds for pool in again.pools] == [0.5, 1.0]


def test_a_model_is_the_same_however_it_was_warmed_up() -> None:
    job = simulated_job()
    job["spec"]["trainer"] = {}
    job["spec"]["generators"][0]["engine"] = {"hf": {}}
    job["spec"]["model"] = {"scratch": {"layers": 3, "warmUp": {"steps": 7}}}
    model = model_of(parse_job(job))
    assert model["scratch"]["layers"] == 3
    assert "warmUp" not in model["scratch"]
    assert model_of(parse_job(simulated_job())) == {}
