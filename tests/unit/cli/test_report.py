"""What a report reads from the metrics of a run."""

import io
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrl import keys
from streamrl.errors import UserError
from streamrl.spec import parse_job
from streamrl_cli.reporting.data import read_run, weighted_bubbles
from streamrl_cli.reporting.page import (
    MOST_POINTS,
    PLOTLY_JS,
    all_charts,
    asset,
    render,
    replicas,
    reward,
    reward_parts,
    reward_tasks,
)
from streamrl_cli.runner.folder import RunFolder, create_folder
from streamrl_cli.runner.progress import WAITS, RunProgress, failures_text, warning_texts
from streamrl_cli.runner.view import LiveView, PlainView, run_panel
from streamrl_cli.weight_stalls import measured_rows
from streamrl_operator.planning.weight_times import WeightTimes
from streamrl_workers.metrics.bubbles import CAUSES
from support.command import streamrl
from support.jobs import simulated_job


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create_folder(parse_job(simulated_job()), base_dir=tmp_path, parent=tmp_path)


def write_lines(folder: RunFolder, name: str, lines: list[dict], *, cut: str = "") -> None:
    folder.file("metrics", f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)


def step(number: int, **more) -> dict:
    line = {"step": number, "reward_mean": 0.5, "length_mean": 9.0, "length_max": 20, "tokens_per_s": 100.0}
    return (
        line
        | {"staleness_mean": 0.5, "staleness_max": 1, "queue": 3, "elapsed_s": 2.0 * (number + 1), "tokens": 200}
        | more
    )


def wall(t: float, wall_s: float, *, instance: str = "a", **parts: float) -> dict:
    return {"t": t, "process": "trainer-0", "role": "trainer", "instance": instance, "wall_s": wall_s, "parts": parts}


def test_a_step_trained_again_counts_once_and_as_the_later(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0), step(1), step(0, reward_mean=0.9)])
    run = read_run(folder.path)
    assert [(line["step"], line["reward_mean"]) for line in run.steps] == [(0, 0.9), (1, 0.5)]


def test_a_line_cut_off_by_a_kill_is_left_out(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0)], cut='{"step": 1, "rew')
    assert len(read_run(folder.path).steps) == 1


def test_timelines_join_the_instances_of_a_process(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0)])
    lines = [wall(101, 1, busy=0.75, pipeline_no_samples=0.25), wall(102, 2, busy=1.75, pipeline_no_samples=0.25)]
    lines += [wall(105, 1, instance="b", busy=0.5, pipeline_no_samples=0.5)]
    write_lines(folder, "trainer-0", lines)
    (line,) = read_run(folder.path).timelines
    assert line.wall_s == pytest.approx(3)
    assert line.totals_s == pytest.approx({"busy": 2.25, "pipeline_no_samples": 0.75})
    assert sum(line.shares["busy"]) * line.bin_minutes * 60 == pytest.approx(2.25, rel=0.02)


def test_nothing_measured_yet_is_said(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="no steps to report yet"):
        read_run(folder.path)


def test_the_page_holds_no_markup_of_the_data(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0), step(1)])
    page = render(read_run(folder.path), plotly_js="")
    assert "<script></script>" in page
    assert page.count("Plotly.react") == 1


def test_a_long_run_is_a_small_page_with_all_its_peaks(folder: RunFolder) -> None:
    lines = [step(at, reward_mean=0.5 + (at == 7001) - (at == 7002)) for at in range(10_000)]
    write_lines(folder, "steps", lines)
    write_lines(
        folder, "trainer-0", [wall(float(at), float(at), busy=at * 0.5, other=at * 0.5) for at in range(1, 9000)]
    )
    run = read_run(folder.path)
    raw = reward(run.steps, run.evaluations)["data"][0]
    found = dict(zip(raw["x"], raw["y"], strict=True))
    assert (found[7002], found[7003], min(raw["x"]), max(raw["x"])) == (1.5, -0.5, 1, 10_000)
    assert len(raw["x"]) <= MOST_POINTS + 2
    assert len(render(run, plotly_js=asset(PLOTLY_JS)).encode()) < 2_000_000


def test_a_gap_stays_a_gap(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(at, queue=None if 4000 <= at < 6000 else 3) for at in range(10_000)])
    queue = {title: figure for title, _, figure in all_charts(read_run(folder.path))}["Queue"]["data"][0]
    inside = [y for x, y in zip(queue["x"], queue["y"], strict=True) if 4010 < x < 5990]
    assert inside and set(inside) == {None}


def test_an_evaluation_that_failed_is_a_dash_and_a_gap(folder: RunFolder) -> None:
    failed, good = ({"step": at, "mean_reward": reward, "prompts": 8} for at, reward in ((0, None), (2, 0.25)))
    write_lines(folder, "steps", [step(0), step(1)])
    write_lines(folder, "evaluations", [failed, good])
    page = render(read_run(folder.path), plotly_js="")
    assert "<b>– → 0.25</b>" in page
    assert '"y":[null,0.25]' in page


def test_sizes_of_a_pool_are_a_line_with_reasons(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0, time_s=160.0)])
    changes = [(100.0, 0, 1, "initialReplicas"), (130.0, 1, 2, "T_gen <b> is high")]
    write_lines(
        folder,
        "scaling",
        [{"time_s": at_s, "pool": "sim", "from": a, "to": b, "reason": reason} for at_s, a, b, reason in changes],
    )
    run = read_run(folder.path)
    (trace,) = replicas(run)["data"]
    assert (trace["x"], trace["y"]) == ([0.0, 0.5, 1.0], [1, 2, 2])
    assert trace["text"][:2] == ["initialReplicas", "T_gen &lt;b&gt; is high"]
    page = render(run, plotly_js="")
    assert "<td>0:30</td><td>1 → 2</td><td>T_gen &lt;b&gt; is high</td>" in page


def test_failed_scores_and_drops_are_added_up_over_all_lines(folder: RunFolder) -> None:
    """A step trained again replaces the line, not what was lost before it."""
    failures = {"score_failures": {"raised": 0, "timeout": 3}, "dropped": {"zero_variance": 2, "too_stale": 0}}
    write_lines(folder, "steps", [step(0, **failures), step(0), step(1, **failures)])
    page = render(read_run(folder.path), plotly_js="")
    assert "<td>scores failed</td><td>timeout</td><td>6</td>" in page
    assert "<td>groups dropped</td><td>zero_variance</td><td>4</td>" in page
    assert "<td>raised</td>" not in page
    assert "<td>too_stale</td>" not in page


def test_log_prob_differences_are_a_line_for_each_pool_and_lag(folder: RunFolder) -> None:
    measure = "train_infer_logprob_diff_mean"
    write_lines(
        folder,
        "steps",
        [
            step(0, trainer={f"{measure}/sim/0": 0.01, f"{measure}/sim/0/<b>": 1.0, f"{measure}/foreign/0": 1.0}),
            step(1, trainer={f"{measure}/sim/0": 0.02, f"{measure}/sim/1": 0.5, f"{measure}/sim/many": 1.0}),
        ],
    )
    charts = {title: figure for title, _, figure in all_charts(read_run(folder.path))}
    lines = {trace["name"]: trace["y"] for trace in charts["Train-infer log-prob difference"]["data"]}
    assert lines == {"sim, lag 0": [0.01, 0.02], "sim, lag 1": [None, 0.5]}, "of the job's pools alone"


async def test_a_warning_is_one_line_above_the_view(folder: RunFolder) -> None:
    above = [{"train_infer_logprob_diff_mean": count} for count in (4, 5, 6)]
    write_lines(folder, "steps", [step(at, above_bound=found, trainer={}) for at, found in enumerate(above)])
    progress = RunProgress(folder=folder)
    steps, _ = await progress.refresh()
    (line,) = progress.warnings(steps)
    assert line.startswith("warning: step 2: the mean train-infer log-prob difference")
    assert not list(progress.warnings((await progress.refresh())[0]))


def test_nothing_lost_is_a_word(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0, score_failures={"timeout": 0}, dropped={"reward_failed": 0})])
    assert "<h2>Failed scores and dropped groups</h2><p>None.</p>" in render(read_run(folder.path), plotly_js="")


def test_stalls_of_a_version_are_means_by_part(folder: RunFolder) -> None:
    loads = {"loads": 2, "pull_seconds": 3.0, "pause_seconds": 0.5, "load_seconds": 1.5, "cache_seconds": 1.0}
    trainer = {"weights_copy_seconds": 0.25, "weights_wait_seconds": 0.0}
    lines = [step(0, trainer=trainer | {"weights_wait_seconds": 1.0}, weights=loads), step(1, trainer=trainer), step(2)]
    rows = measured_rows(lines, job=folder.job)
    assert rows == [
        ("trainer", "-", "-", "0.25", "-", "-", "0.5", "0.75"),
        ("generators", "1.5", "0.25", "0", "0.75", "0.5", "-", "1.5"),
    ]
    write_lines(folder, "steps", lines)
    run = read_run(folder.path)
    assert "".join(f"<td>{cell}</td>" for cell in rows[1]) in render(run, plotly_js="")
    planned = WeightTimes(
        version_bytes=1, ranks=1, copy_s=2.0, publish_s=0.0, deltas=None, pools=(), waits_for_pull=False
    )
    cells = ("trainer, estimated", "-", "-", "2", "-", "-", "-", "2")
    page = render(replace(run, weight_times=planned), plotly_js="")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    write_lines(folder, "steps", [step(0)])
    assert "<h2>Weights</h2>" not in render(read_run(folder.path), plotly_js="")


def test_lines_of_a_chart_differ_in_colour(folder: RunFolder) -> None:
    parts = dict.fromkeys(
        (f"{part}_seconds" for part in ("data", "forward", "backward", "collectives", "optimiser")), 1.0
    )
    write_lines(folder, "steps", [step(at, trainer=parts) for at in range(3)])
    figures = {title: figure for title, _, figure in all_charts(read_run(folder.path))}
    colours = [line["line"]["color"] for line in figures["Passes"]["data"]]
    assert len(set(colours)) == len(parts)


@pytest.mark.parametrize("key", ["reward_parts", "queue"])
def test_charts_without_data_are_left_out(folder: RunFolder, key: str) -> None:
    """One reward alone, a simulated trainer without gradients, a column that no line has."""
    lines = [step(at, reward_parts={"answer": 0.5}, trainer={"gradient_norm": 0.0}) for at in range(3)]
    write_lines(folder, "steps", [{name: line[name] for name in line if name != key} for line in lines])
    titles = [title for title, _, _ in all_charts(read_run(folder.path))]
    assert titles == [
        name for name in ("Reward", "Length of completions", "Throughput", "Staleness", "Queue") if name.lower() != key
    ]


def test_each_of_several_rewards_is_a_line(tmp_path: Path) -> None:
    job = simulated_job()
    job["spec"]["task"]["rewards"] = [
        {"name": name, "weightPercent": 50, "exactMatch": {}} for name in ("answer", "style")
    ]
    folder = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path)
    write_lines(folder, "steps", [step(at, reward_parts={"answer": 0.5, "style": 2.0}) for at in range(3)])
    traces = reward_parts(read_run(folder.path))["data"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in traces] == [
        ("answer", [1, 2, 3], [0.5] * 3),
        ("style", [1, 2, 3], [2.0] * 3),
    ]


def test_each_task_of_a_mixture_has_its_lines_and_its_held_out_points(tmp_path: Path) -> None:
    job = simulated_job()
    alone = {name: job["spec"]["task"].pop(name) for name in ("dataset", "rewards")}
    job["spec"]["task"]["mixture"] = [{"name": name, **alone} for name in ("sums", "game")]
    folder = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path)
    means = [(0.5, 0.25), (0.5, None), (0.5, 0.25)]
    lines = [
        step(
            at, tasks={"sums": {"reward_mean": sums}, "game": {"reward_mean": game}}, reward_parts={"sums/answer": sums}
        )
        for at, (sums, game) in enumerate(means)
    ]
    write_lines(folder, "steps", lines)
    tasks = {"sums": {"mean_reward": 0.75}, "game": {"mean_reward": None}}
    write_lines(folder, "evaluations", [{"step": 0, "mean_reward": 0.75, "tasks": tasks}])
    run = read_run(folder.path)
    traces = reward_tasks(run.steps, run.evaluations)["data"]
    assert [(trace["name"], trace["x"], trace["y"]) for trace in traces] == [
        ("sums", [1, 2, 3], [0.5] * 3),
        ("sums, held-out", [0], [0.75]),
        ("game", [1, 3], [0.25] * 2),
        ("game, held-out", [0], [None]),
    ]
    assert "Reward by task" in [title for title, _, _ in all_charts(run)]


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ({"timeout": 12, "raised": 0}, "12 scores failed: timeout"),
        ({"timeout": 0, "raised": 1}, "1 score failed: raised"),
        ({"raised": 2, "timeout": 9}, "11 scores failed: timeout 9, raised 2"),
        ({"raised": 0}, ""),
        ({}, ""),
    ],
)
def test_failures_in_a_few_words(failures: dict[str, int], text: str) -> None:
    assert failures_text(failures) == text


async def test_the_first_failure_of_each_kind_is_a_line_once(folder: RunFolder) -> None:
    old = step(0, time_s=1.0, score_failures={"died": 1}, score_errors={"died": "mended since"})
    write_lines(folder, "steps", [old])
    progress = RunProgress(folder=folder)
    await progress.refresh()
    assert list(progress.score_error_lines()) == []
    failed = {
        "score_failures": {"raised": 2},
        "score_errors": {"raised": "mine: raised KeyError: 'x' (mine.py, line 3)"},
    }
    write_lines(folder, "steps", [old, step(1, time_s=time.time(), **failed)])
    await progress.refresh()
    text = "2 scores failed (raised), the first: mine: raised KeyError: 'x' (mine.py, line 3)"
    assert list(progress.score_error_lines()) == [f"warning: {text}"]
    assert list(progress.score_error_lines()) == []
    assert warning_texts(failed, silent=None) == [text]


async def test_the_plain_view_tells_failures_with_the_step(folder: RunFolder) -> None:
    progress, said = RunProgress(folder=folder), list[str]()
    lines = [step(at, score_failures={"timeout": int(at in {2, 5, 6})}) for at in range(20)]
    with PlainView(progress, say=said.append) as view:
        for line in lines:
            view.update([line], [])
    assert [line.split("  ")[0] for line in said] == ["step 10/20", "step 20/20"]
    assert said[0].endswith("  3 scores failed: timeout")
    assert "failed" not in said[1]


async def test_the_live_view_says_that_scores_failed(folder: RunFolder) -> None:
    progress, out = RunProgress(folder=folder), io.StringIO()
    write_lines(
        folder,
        "steps",
        [step(at, time_s=1.0 * at, score_failures={"timeout": failed}) for at, failed in enumerate((9, 3))],
    )
    with LiveView(progress, console=Console(file=out, width=120)) as view:
        view.update(*await progress.refresh())
    assert "12 scores failed: timeout" in out.getvalue()


async def test_the_live_view_shows_connected_generators_and_bounds(tmp_path: Path) -> None:
    job = simulated_job()
    job["spec"]["generators"][0]["scaling"] = {"auto": {"minReplicas": 1, "initialReplicas": 2, "maxReplicas": 4}}
    folder = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path)
    progress, out = RunProgress(folder=folder), io.StringIO()
    progress.status = {"generators": [{"id": "generator-sim-0", "pool": "sim", "bubbles": {}, "wall_s": 0.0}]}
    with LiveView(progress, console=Console(file=out, width=120)) as view:
        view.update([], [])
    assert "sim 1 (1 to 4)" in out.getvalue()


async def test_progress_of_a_long_run_stays_small(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(number, reward_mean=float(number >= 2000)) for number in range(4000)])
    progress = RunProgress(folder=folder)
    new, _ = await progress.refresh()
    assert (len(new), len(progress.steps), progress.done_steps) == (4000, 10, 4000)
    assert progress.rewards.tolist() == [float(number >= 2000) for number in range(4000)]
    assert progress.rewards.itemsize == 8


async def test_the_views_say_that_an_evaluation_failed(folder: RunFolder) -> None:
    write_lines(folder, "steps", [step(0, interval_s=1.0)])
    write_lines(folder, "evaluations", [{"step": 0, "mean_reward": None, "prompts": 8}])
    for make in (
        lambda progress, out: PlainView(progress, say=out.write),
        lambda progress, out: LiveView(progress, console=Console(file=out, width=120)),
    ):
        progress, out = RunProgress(folder=folder), io.StringIO()
        with make(progress, out) as view:
            view.update(*await progress.refresh())
        assert "held-out reward at step 0: failed, nothing could be scored (8 prompts)" in out.getvalue()


def test_bubbles_of_all_processes_are_weighted_by_cost(tmp_path: Path) -> None:
    job = simulated_job()
    job["spec"]["trainer"]["costPerHour"] = "3.00"
    folder = create_folder(parse_job(job), base_dir=tmp_path, parent=tmp_path)
    write_lines(folder, "steps", [step(0)])
    write_lines(folder, "trainer-0", [wall(101, 1, busy=1.0)])
    write_lines(folder, "generator-sim-0", [wall(101, 1, busy=0.0, skew=1.0)])
    ratios = weighted_bubbles(read_run(folder.path))
    assert (ratios["busy"], ratios["skew"]) == pytest.approx((0.75, 0.25))


async def test_idleness_for_want_of_rewards_is_named_with_what_helps(folder: RunFolder) -> None:
    """A reward is not blamed on generation: neither in the report nor in the live view and `streamrl top`."""
    parts = {"busy": 1.0, "pipeline_scoring": 2.5, "pipeline_staleness": 0.5}
    write_lines(folder, "steps", [step(0)])
    write_lines(folder, "generator-sim-0", [wall(104, 4, **parts)])
    page = render(read_run(folder.path), plotly_js="")
    assert "<p><code>scoring</code>: finished samples wait for their rewards: a larger task.processes" in page
    assert "<code>staleness</code>" not in page and "<code>no_samples</code>" not in page
    progress, out = RunProgress(folder=folder), io.StringIO()
    progress.status = {"generators": [{"id": "g", "pool": "sim", "bubbles": parts, "wall_s": 4.0}], "trainer": None}
    Console(file=out, width=120).print(run_panel(progress))
    assert "busy 25%, waits: scoring 62%" in out.getvalue()


def test_each_cause_of_idleness_says_what_helps() -> None:
    assert set(WAITS) == set(CAUSES)


@pytest.mark.parametrize(
    ("lines", "result", "said"),
    [
        (range(3), {"status": "succeeded", "steps": 5}, "2 of the 5 steps"),  # the last are gone
        ((0, 3), {"status": "succeeded", "steps": 4}, "2 of the 4 steps"),
        ((1, 2), None, "1 of the 3 steps"),
        (range(3), {"status": "failed", "reason": "no more"}, ""),
        (range(3), {"status": "succeeded", "steps": 10**300}, ""),
    ],
)
def test_steps_are_counted_by_the_result_and_a_damaged_file_is_said(
    lines: Sequence[int],
    result: dict[str, Any] | None,
    said: str,
    folder: RunFolder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_lines(folder, "steps", [step(number) for number in lines])
    if result is not None:
        folder.file(keys.FILE_RESULT).write_text(json.dumps(result))
    outcome = streamrl(capsys, "report", str(folder.path))
    assert outcome.err == ([f"metrics/steps.jsonl has no line of {said}: it was damaged"] if said else [])
