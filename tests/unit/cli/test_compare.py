"""Several runs side by side: what is one variant, rewards at equal effort, intervals over seeds, the page."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.spec import parse_job
from streamrl_cli.main import main
from streamrl_cli.reporting.comparison import Comparison, Curve, compare, mean
from streamrl_cli.reporting.data import read_run
from streamrl_cli.runner.folder import create_folder
from support.jobs import simulated_job

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes a run: evaluations at steps 0, 2, 4; a step takes `step_s` and trains 100 tokens."""

    def made(name: str, *, seed: int, rewards: tuple[float, ...], step_s: float = 10.0, lr: float = 1e-3) -> Path:
        job = simulated_job()
        job["spec"]["seed"] = seed
        job["spec"]["trainer"]["learningRate"] = lr
        folder = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path, path=tmp_path / name)
        steps = [
            {"step": at, "reward_mean": 0.1 * at, "elapsed_s": step_s * (at + 1), "tokens": 100, "samples": 8}
            for at in range(4)
        ]
        held_out = [{"step": 2 * at, "mean_reward": value} for at, value in enumerate(rewards)]
        walls = [{"t": 1000 + 4 * step_s, "instance": "a", "wall_s": 4 * step_s, "parts": {"busy": 4 * step_s}}]
        for file, lines in (("steps", steps), ("evaluations", held_out), ("trainer-0", walls)):
            folder.file("metrics", f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return folder.path

    return made


def compared(*paths: Path, reward: str | None = None) -> Comparison:
    return compare([read_run(path) for path in paths], reward=reward)


def test_runs_that_differ_in_the_seed_alone_are_one_variant(make: Make) -> None:
    slow, fast = ({"lr": 1e-3}, {"lr": 1e-2})
    found = compared(
        make("a", seed=0, rewards=(0.1, 0.3, 0.5), **slow),
        make("b", seed=0, rewards=(0.1, 0.5, 0.7), **fast),
        make("c", seed=1, rewards=(0.2, 0.4, 0.6), **slow),
    )
    assert [[run.name for run in one.runs] for one in found.variants] == [["a", "c"], ["b"]]
    assert [one.label for one in found.variants] == ["trainer.learningRate=0.001", "trainer.learningRate=0.01"]
    beyond = found.difference(found.variants[1])
    assert beyond is not None
    assert beyond.value == pytest.approx(0.2), "b - a, of the same seed; c has no partner"


def test_rewards_are_read_at_the_effort_that_all_have_spent(make: Make) -> None:
    found = compared(
        make("a", seed=0, rewards=(0.0, 0.4, 0.6), step_s=10.0),
        make("b", seed=0, rewards=(0.0, 0.4, 0.6), step_s=5.0, lr=1e-2),
    )
    assert found.budgets == pytest.approx({"steps": 4, "tokens": 400, "seconds": 20, "cost": 20 / 3600})
    at_time = [one.at("seconds", 20.0) for one in found.variants]
    assert [value and value.value for value in at_time] == pytest.approx([0.4, 0.6])
    reached = [one.first("seconds", found.goal) for one in found.variants]
    assert [value and value.value for value in reached] == pytest.approx([40.0, 20.0])


def test_an_interval_is_students() -> None:
    assert mean([]) is None
    assert mean([0.5]).half_width is None
    found = mean([1.0, 2.0, 3.0])
    assert (found.value, found.half_width) == pytest.approx((2.0, 4.303 / 3**0.5), rel=1e-3)


@pytest.mark.parametrize(
    ("amount", "reward"), [(0, 0.0), (1, 0.2), (2, 0.4), (3, 0.3), (4, 0.2), (5, None), (-1, None)]
)
def test_a_curve_is_straight_between_its_values(amount: float, reward: float | None) -> None:
    curve = Curve(rewards=(0.0, 0.4, 0.2), efforts={"steps": (0.0, 2.0, 4.0)})
    assert curve.at("steps", amount) == (None if reward is None else pytest.approx(reward))


def test_a_reward_that_was_never_reached_has_no_effort() -> None:
    curve = Curve(rewards=(0.1, 0.5), efforts={"steps": (0.0, 2.0)})
    assert [curve.first("steps", reward) for reward in (0.1, 0.3, 0.6)] == [0.0, pytest.approx(1.0), None]


def test_without_evaluations_it_is_the_training_reward(make: Make) -> None:
    found = compared(make("a", seed=0, rewards=()), make("b", seed=1, rewards=(0.1, 0.2, 0.3)))
    assert found.reward == "training"
    assert found.variants[0].runs[0].curve.rewards == pytest.approx((0.0, 0.1, 0.2, 0.3))


def test_the_command_prints_tables_and_writes_a_page(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make(f"r{seed}", seed=seed, rewards=(0.1, 0.3, 0.5 + seed / 100)) for seed in range(3)]
    other = make("<script>", seed=0, rewards=(0.1, 0.3, 0.9), lr=1e-2)
    page = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), str(other), "--plot", str(page)]) == 0
    out = capsys.readouterr().out
    assert "A: trainer.learningRate=0.001" in out
    assert "0.510 ± 0.025" in out
    assert "+0.400" in out
    text = page.read_text()
    assert "&lt;script&gt;" in text
    assert "<script>," not in text


def test_a_reward_that_a_run_does_not_have_is_refused(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("a", seed=0, rewards=(0.1, 0.2, 0.3))
    assert main(["compare", str(run), "--reward", "sampled"]) == 2
    assert capsys.readouterr().err == "--reward: is not in every run, got 'sampled'; take training\n"
