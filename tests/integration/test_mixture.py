"""A mixture of tasks, each with prompts, rewards and turns of its own: the task pool alone, and whole runs that are killed.

Simulated engine and trainer; processes, gRPC, task pool and journal are real. A task's prompts begin with its name, and its reward fails for
any other prompt; what each earns is a number of its own. So a sample that met another task's reward, or another number of turns, shows in the
means of every step.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from streamrl import keys
from streamrl.errors import UserError
from streamrl.mixture import Mixture
from streamrl_workers.scheduler.journal.store import open_for_reading
from streamrl_workers.tasks.values import PlayTurn, ScoreSample
from support.endpoints import say, serving
from support.held_runs import Hold
from support.jobs import simulated_job
from support.runs import LocalRun, wait_for
from support.task_jobs import write_lines
from support.task_pools import running_pool
from support.turn_runs import lines

WORKERS = ("scheduler", "trainer-0", "generator-sim-0", "generator-sim-1")
STEPS, KILLS, HELD_AT = 40, 5, 25
PATIENCE_S = 1200.0
"""For a step, a process or the end on a busy machine."""
WEIGHTS = {"held": 3, "half": 2, "game": 1}
EARNED = {"half": 0.5, "game": 0.75}
TURNS = {"held": 1, "half": 1, "game": 3}

FUNCTIONS = """
def half(*, prompt, completion, answer, metadata):
    assert prompt.startswith("half ") and metadata["of"] == "half", prompt
    return 0.5

class Game:
    def __init__(self):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return "on", 0.25, self.turns == 3

def play(*, question, answer, metadata, seed):
    assert question.startswith("game "), question
    return Game()
"""


def write_tasks(base: Path) -> list[dict[str, Any]]:
    """The mixture, but for the rewards of `held`."""
    (base / "mixed_tasks.py").write_text(FUNCTIONS)
    for name in WEIGHTS:
        rows = (f'{{"prompt": "{name} {n}", "answer": "{name} {n}", "of": "{name}"}}\n' for n in range(50))
        (base / f"{name}.jsonl").write_text("".join(rows))
    more: dict[str, dict[str, Any]] = {
        "held": {"rewards": [{"name": "answer", "exactMatch": {}}]},
        "half": {"rewards": [{"name": "half", "python": {"function": "mixed_tasks:half"}}], "maxTokens": 24},
        "game": {
            "rewards": [{"name": "won", "environment": {}}],
            "environment": {"python": {"function": "mixed_tasks:play"}, "maxTurns": 4},
            "maxTokens": 16,
            "stop": ["\n"],
        },
    }
    return [
        {
            "name": name,
            "weight": weight,
            "dataset": {"jsonl": {"path": f"{name}.jsonl", "heldOutPercent": 20}},
            **more[name],
        }
        for name, weight in WEIGHTS.items()
    ]


async def test_each_prompt_has_the_data_the_rewards_and_the_game_of_its_task(tmp_path: Path) -> None:
    mixture = Mixture([*WEIGHTS.values()])
    names = [list(WEIGHTS)[mixture.task_of(index)] for index in range(12)]
    task = {"mixture": write_tasks(tmp_path), "sampling": {"maxTokens": 32}, "processes": 2}
    async with running_pool(tmp_path, modules={}, **task) as pool:
        for split in ("train", "held_out"):
            texts = [one.text for one in await pool.prompts(split=split, first_index=0, count=12)]
            assert [text.split()[0] for text in texts] == names
            assert len(set(texts)) == 12, "no row twice"
        scores = await pool.score([_score(index, text) for index, text in enumerate(texts)])
        assert [dict(score.parts) for score in scores] == [
            {"held": {"answer": 1.0}, "half": {"half": 0.5}, "game": {"won": 0.25}}[name] for name in names
        ]
        game = names.index("game")
        (answer,) = await pool.play([_turn(game)])
        assert (answer.observation, answer.reward, answer.done) == ("on", 0.25, False)
        assert pool.held_out_size == mixture.size([10, 10, 10])


async def test_the_budget_of_a_tasks_judge_is_spent_by_its_samples_alone(tmp_path: Path) -> None:
    bounds: dict[str, dict[str, int]] = {"first": {"maxSamples": 2}, "second": {}, "third": {"maxSamples": 1}}
    dataset = write_lines(tmp_path / "lines.jsonl", count=60)
    with serving(lambda handler, _: say(handler, 200, '{"reward": 1.0}')) as endpoint:
        tasks = [
            {"name": name, "dataset": dataset, "rewards": [{"name": "judge", "http": {"url": endpoint.url, **bound}}]}
            for name, bound in bounds.items()
        ]
        async with running_pool(tmp_path, modules={}, run_dir=tmp_path, mixture=tasks) as pool:
            await pool.score([_score(index, "x") for index in (0, 1, 2, 3, 4, 7)])
            with pytest.raises(UserError, match=r"this run has sent 2 samples, 2 may be") as refused:
                await pool.score([_score(6, "x")])
        assert refused.value.field == "spec.task.mixture[0].rewards.0.http.maxSamples"
    assert len(endpoint.bodies) == 6


@pytest.mark.parametrize(
    ("number", "change", "field"),
    [
        (1, {"dataset": {"jsonl": {"path": "absent.jsonl"}}}, "spec.task.mixture[1].dataset.jsonl.path"),
        (2, {"rewards": [{"name": "r", "regex": {"pattern": "("}}]}, "spec.task.mixture[2].rewards.0.regex.pattern"),
        (0, {"format": {"function": "absent:f"}}, "spec.task.mixture[0].format.function"),
    ],
)
async def test_what_is_wrong_with_a_task_is_told_of_that_task(
    number: int, change: dict[str, Any], field: str, tmp_path: Path
) -> None:
    tasks = write_tasks(tmp_path)
    tasks[number] |= change
    with pytest.raises(UserError) as caught:
        async with running_pool(tmp_path, modules={}, mixture=tasks, sampling={"maxTokens": 32}):
            pass
    assert caught.value.field == field


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_at_random_the_shares_are_exact_and_each_task_has_its_own_reward(tmp_path: Path) -> None:
    run_and_kill(tmp_path, seed=5, kills=KILLS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_shares_are_exact_after_thirty_kills(seed: int, tmp_path: Path) -> None:
    """Ten a run."""
    run_and_kill(tmp_path, seed=seed, kills=10)


def run_and_kill(tmp_path: Path, *, seed: int, kills: int) -> None:
    """A run that is killed so often before it is half through."""
    rng = random.Random(seed)
    job = simulated_job(steps=STEPS)
    hold = Hold.on(job, tmp_path, step=HELD_AT)
    tasks = write_tasks(tmp_path)
    tasks[0]["rewards"] = job["spec"]["task"].pop("rewards")
    del job["spec"]["task"]["dataset"]
    job["spec"]["task"]["mixture"] = tasks
    job["spec"]["trainer"]["engine"]["simulated"] = {"secondsPerStep": 0.1}
    run = LocalRun.start(job, folder=tmp_path / "run", base_dir=tmp_path)
    for moment in sorted(rng.choices(range(HELD_AT), k=kills)):
        until(run, lambda at=moment: run.steps() >= at, f"step {moment}")  # type: ignore[misc]
        victim = rng.choice([*WORKERS, "all"])
        if victim == "all":
            run.kill_all(WORKERS)
            run.assert_exact()
            run.resume()
        else:
            until(run, lambda name=victim: run.kill(name), f"{victim} to kill")  # type: ignore[misc]
    hold.let_go()
    assert run.process.wait(PATIENCE_S) == 0, run.logs()
    assert run.steps() == STEPS
    run.assert_exact()
    assert_exact_shares(run)
    assert_each_has_its_own(run)


def until(run: LocalRun, condition: Callable[[], Any], what: str) -> None:
    """Wait; the run must not end before."""

    def look() -> Any:
        ended = run.process.poll() is not None
        value = condition()
        assert value or not ended, f"the run ended before {what}; {run.logs()}"
        return value

    wait_for(look, what=f"{what}; {run.logs()}", deadline_s=PATIENCE_S)


def assert_exact_shares(run: LocalRun) -> None:
    """Every planned prompt once, in the order of the mixture."""
    with closing(open_for_reading(run.folder / keys.FILE_JOURNAL)) as journal:
        planned = [index for (index,) in journal.execute("SELECT prompt_index FROM groups ORDER BY group_id")]
    assert planned == list(range(len(planned)))
    assert len(planned) >= STEPS * 4
    mixture, names = Mixture([*WEIGHTS.values()]), list(WEIGHTS)
    whole = len(planned) // mixture.period
    counts = Counter(names[mixture.task_of(index)] for index in planned[: whole * mixture.period])
    assert counts == {name: whole * weight for name, weight in WEIGHTS.items()}


def assert_each_has_its_own(run: LocalRun) -> None:
    """Rewards of each step and evaluation, by task."""
    steps, evaluations = lines(run, "steps.jsonl"), lines(run, "evaluations.jsonl")
    assert {line["step"] for line in steps} == set(range(STEPS))
    for line in steps:
        assert sum(task["groups"] for task in line["tasks"].values()) == line["groups"] == 4
        assert set(line["tasks"]) == set(WEIGHTS)
        assert line["reward_failed"] == sum(line["score_failures"].values()) == 0
        for name, earned in EARNED.items():
            assert line["tasks"][name]["reward_mean"] in (earned, None)
        turns = sum(TURNS[name] * task["groups"] for name, task in line["tasks"].items())
        assert line["turns_mean"] == pytest.approx(turns / line["groups"])
    assert all(any(line["tasks"][name]["groups"] for line in steps) for name in WEIGHTS)
    for line in evaluations:
        assert {name: task["prompts"] for name, task in line["tasks"].items()} == {"held": 4, "half": 3, "game": 1}
        assert {name: line["tasks"][name]["mean_reward"] for name in EARNED} == EARNED


def _score(index: int, text: str) -> ScoreSample:
    return ScoreSample(
        group_id=index,
        sample_index=0,
        split="held_out",
        prompt_index=index,
        completion=text,
        environment_reward=0.25,
    )


def _turn(index: int) -> PlayTurn:
    return PlayTurn(
        group_id=index,
        sample_index=0,
        lease=1,
        split="train",
        prompt_index=index,
        completions=("a",),
        last_token=1,
    )
