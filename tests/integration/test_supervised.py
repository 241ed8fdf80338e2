"""Real runs that learn from rows, without generators: kills change no weight, every row is trained once a pass, bad rows are named."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from streamrl_cli.replaying.history import read_history
from streamrl_cli.reporting.samples import of_group
from streamrl_workers.metrics.jsonl import read_jsonl
from streamrl_workers.stream.segments import trained_places
from support.replayed_runs import ended_run
from support.runs import LocalRun, streamrl
from support.supervised_jobs import PASSES, STEPS, TRAINED, supervised_job, write_model, write_rows, write_turns

pytestmark = pytest.mark.timeout(1800)

PATIENCE_S = 600.0
WORKERS = ("scheduler", "trainer-0")


def run_of(job: dict[str, Any], base: Path, *, steps: int = STEPS, kills: int = 0, seed: int = 0) -> LocalRun:
    """A run that has ended, with so many deaths."""
    write_model(base)
    run = ended_run(job, base, steps=steps, kills=kills, seed=seed, workers=WORKERS, patience_s=PATIENCE_S)
    run.assert_exact()
    return run


def trained_prompts(run: LocalRun, groups: range) -> list[str]:
    """As the run's own samples have them."""
    return [of_group(run.folder, group_id=number).samples[0].prompt for number in groups]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LocalRun:
    base = tmp_path_factory.mktemp("undisturbed")
    write_rows(base)
    return run_of(supervised_job(), base)


def test_every_row_is_trained_once_in_each_pass(undisturbed: LocalRun) -> None:
    passes = [trained_prompts(undisturbed, range(n * TRAINED, (n + 1) * TRAINED)) for n in range(PASSES)]
    assert [len(set(one)) for one in passes] == [TRAINED] * PASSES
    assert passes[0] != passes[1]
    assert set(passes[0]) == set(passes[1])
    (sample,) = of_group(undisturbed.folder, group_id=3).samples
    left, _, _ = sample.prompt.partition("+")
    assert sample.written.turns == [str(2 * int(left))]


def test_the_held_out_loss_is_told_before_the_first_step_at_its_interval_and_at_the_end(undisturbed: LocalRun) -> None:
    lines = {line["step"]: line["trainer"] for line in read_jsonl(undisturbed.folder / "metrics" / "steps.jsonl")}
    losses = {step + 1: one["held_out_loss"] for step, one in lines.items() if "held_out_loss" in one}
    assert list(losses) == [4, 8, STEPS]
    assert losses[STEPS] < losses[4] < lines[0]["initial_held_out_loss"]
    assert f"held-out loss {lines[0]['initial_held_out_loss']:.3f} -> {losses[STEPS]:.3f}" in undisturbed.said()


def test_kills_change_no_weight(undisturbed: LocalRun, tmp_path: Path) -> None:
    write_rows(tmp_path)
    run = run_of(supervised_job(), tmp_path, kills=2, seed=3)
    expected, found = read_history(undisturbed.folder), read_history(run.folder)
    hashes = [expected.hash_of(version) for version in range(STEPS + 1)]
    assert len(set(hashes)) == STEPS + 1, "every step moves the weights"
    assert [found.hash_of(version) for version in range(STEPS + 1)] == hashes
    replayed = streamrl("replay", str(run.folder))
    assert replayed.returncode == 0, replayed


@pytest.mark.soak
def test_only_rows_with_the_reward_are_trained_and_the_next_run_begins_with_the_model(tmp_path: Path) -> None:
    write_rows(tmp_path)
    job = supervised_job(rewardField="reward", minReward=1.0)
    job["spec"]["pipeline"]["steps"] = 4
    run = run_of(job, tmp_path)
    counts = Counter(int(prompt.partition("+")[0]) % 2 for prompt in trained_prompts(run, range(18)))
    assert set(counts) == {1}
    assert {line["reward_mean"] for line in read_jsonl(run.folder / "metrics" / "steps.jsonl")} == {1.0}
    after = [line["trainer"] for line in read_jsonl(run.folder / "metrics" / "steps.jsonl")][-1]["held_out_loss"]
    job["spec"]["model"]["path"]["directory"] = "run/model"
    job["spec"]["pipeline"]["steps"] = 1
    following = LocalRun.start(job, folder=tmp_path / "following", base_dir=tmp_path)
    assert following.process.wait(PATIENCE_S) == 0, following.logs()
    (line,) = read_jsonl(following.folder / "metrics" / "steps.jsonl")
    assert line["trainer"]["initial_held_out_loss"] == pytest.approx(after, rel=1e-4)


def test_samples_of_several_turns_are_learnt_from_as_they_were_logged_each_by_its_weight(tmp_path: Path) -> None:
    write_turns(tmp_path)
    weights = {"dualGenerator": {"sharePercent": 30}}  # 1.2 of four answers
    job = supervised_job(answers="Tokens", rewardField="reward", weights=weights)
    job["spec"]["pipeline"] |= {"steps": 3, "batchGroups": 4}
    run = run_of(job, tmp_path, steps=3)
    found = [of_group(run.folder, group_id=number).samples[0] for number in range(12)]
    assert {one.reward: one.advantage for one in found} == pytest.approx({3.0: 1.0, 2.0: 0.2})
    assert all(trained_places(one.sample) == [0, 1, 4] for one in found)
    assert all(len(one.written.turns) == 2 and one.written.contexts == [0] for one in found)
    logged = {(one.prompt, tuple(one.document()["tokens"])) for one in found}
    assert logged <= {(f"{prompt}+", (4 + answer, 5, 6, 7, 4 + answer)) for prompt in range(10) for answer in (2, 3)}


@pytest.mark.soak
def test_kills_change_no_weight_that_a_critic_has_taught(tmp_path: Path) -> None:
    hashes = []
    for name, kills in {"undisturbed": 0, "killed": 3}.items():
        (base := tmp_path / name).mkdir()
        write_turns(base)
        weights = {"critic": {"learningRate": 0.01, "warmUpSteps": 1, "miniBatches": 2}}
        job = supervised_job(answers="Tokens", rewardField="reward", weights=weights)
        job["spec"]["pipeline"]["steps"] = 6
        run = run_of(job, base, steps=6, kills=kills)
        history = read_history(run.folder)
        hashes.append([history.hash_of(version) for version in range(7)])
        turns = [segment.reward for segment in of_group(run.folder, group_id=0).samples[0].sample.segments]
        assert turns == [0.5, 0.0, 0.0]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 6, "the first step teaches the critic alone, the others move the weights"


BAD_ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no completion": ({"completion": None}, {}, "rows.jsonl line 8 has no field completion"),
    "no text": ({"completion": [1, 2]}, {}, "rows.jsonl line 8: completion must be a text or a number"),
    "empty": ({"completion": ""}, {}, "rows.jsonl line 8 has no answer to imitate"),
    "unknown character": ({"completion": "ä"}, {}, "rows.jsonl line 8 cannot be tokenized"),
    "too long": ({"prompt": "1" * 40}, {}, "rows.jsonl line 8: prompt and answer must have at most 32 tokens"),
    "reward": (
        {"reward": "much"},
        {"rewardField": "reward", "minReward": 0.5},
        "rows.jsonl line 8: reward must be a number from -1e+09 to 1e+09",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_ends_the_run_before_its_first_step(name: str, tmp_path: Path) -> None:
    fields, algorithm, expected = BAD_ROWS[name]
    write_rows(tmp_path, changed={7: fields})
    write_model(tmp_path)
    run = LocalRun.start(supervised_job(**algorithm), folder=tmp_path / "run", base_dir=tmp_path)
    assert run.wait_end() == 2, run.logs()
    (line,) = [line for line in run.said().splitlines() if "line 8" in line]
    assert expected in line
    assert run.steps() == 0
