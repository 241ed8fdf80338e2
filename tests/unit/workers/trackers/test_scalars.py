"""Names and values that trackers get."""

import math

from streamrl_workers.trackers.scalars import evaluation_point, step_point

LINE = {
    "step": 4,
    "attempt": 2,
    "time_s": 100.5,
    "elapsed_s": 7.0,
    "cost": {"": 0.5, "math pool": 0.25},
    "reward_mean": 0.5,
    "reward_parts": {"answer": 0.25},
    "dropped": {"zero_variance": 3},
    "score_failures": {"timeout": 1},
    "staleness": {"0": 4},
    "trainer": {
        "loss": 0.1,
        "clip_fraction": 0.5,
        "clip_fraction/local/1": 0.75,
        "reward_mean": 0.75,
        "entropy": math.nan,
        "value_loss": None,
    },
    "bubbles": {"generators": {"busy": 0.75}, "trainer": None},
    "above_bound": {"a": 1},
}


def test_a_step_is_told_behind_it_under_stable_names() -> None:
    point = step_point(LINE)
    assert (point.kind, point.step, point.time_s) == ("train", 5, 100.5)
    assert point.values == {
        "train/attempt": 2.0,
        "train/elapsed_s": 7.0,
        "train/loss": 0.1,
        "train/clip_fraction": 0.5,
        "train/pool/local/1/clip_fraction": 0.75,
        "train/reward_mean": 0.5,
        "train/reward/answer": 0.25,
        "train/dropped/zero_variance": 3.0,
        "train/score_failures/timeout": 1.0,
        "bubbles/generators/busy": 0.75,
        "cost/trainer": 0.5,
        "cost/math_pool": 0.25,
        "cost/total": 0.75,
    }


def test_a_task_of_a_mixture_has_names_of_its_own() -> None:
    tasks = {"sums": {"groups": 4, "reward_mean": 0.5}, "game": {"groups": 0, "reward_mean": None}}
    point = step_point({"step": 0, "tasks": tasks})
    assert point.values == {
        "train/task/sums/groups": 4,
        "train/task/sums/reward_mean": 0.5,
        "train/task/game/groups": 0,
    }
    point = evaluation_point({"step": 0, "tasks": {"sums": {"mean_reward": 0.25}}})
    assert point.values == {"eval/task/sums/mean_reward": 0.25}


def test_no_name_is_the_beginning_of_another() -> None:
    names = sorted(step_point(LINE).values)
    assert [name for name in names for other in names if other.startswith(f"{name}/")] == []


def test_an_evaluation_is_told_at_the_steps_of_its_weights() -> None:
    line = {"step": 3, "mean_reward": None, "sampled_reward": 0.5, "prompts": 8, "failed": 8, "time_s": 1.0, "cost": {}}
    point = evaluation_point(line)
    assert (point.kind, point.step) == ("eval", 3)
    assert point.values == {"eval/sampled_reward": 0.5, "eval/prompts": 8.0, "eval/failed": 8.0}
