"""The charts of a run (Plotly figures, plain dictionaries), and the page that binds them, from the templates beside it. Pure.

Whatever stands in a run folder is data: the templating library escapes all of it, figures travel as JSON that no script is made of, and
the page's policy lets no script run but the two that it names by their hashes.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import cycle
from textwrap import wrap
from typing import Any, cast

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from streamrl.text import plain
from streamrl_cli.reporting.data import RunData, weighted_bubbles
from streamrl_cli.reporting.samples import ShownSample
from streamrl_cli.reporting.walls import Timeline
from streamrl_cli.runner.progress import (
    PARTS,
    WAITS,
    bubble_shares,
    format_count,
    format_number,
    format_seconds,
    held_out_losses,
    main_wait,
)
from streamrl_cli.weight_stalls import HEAD, estimated_rows, measured_rows
from streamrl_workers.metrics import logprob_diff

Figure = dict[str, Any]
Chart = tuple[str, str, Figure]
"""Title, what it says, figure."""
PLOTLY_JS, DRAW_JS, STYLE = "plotly-basic.min.js", "draw.js", "style.css"
"""Files of `static`: plotly.js as its maintainers build it, without maps and three dimensions; ours, which calls it; the dress of every page."""
WHY_NO_SCORE = {
    "raised": "the reward or the environment raised",
    "timeout": "it took longer than timeoutSeconds",
    "died": "its process ended",
    "bad_value": "what it gave cannot be used: a reward must be a finite number",
    "memory": "it ran out of memory",
    "verifier_raised": "the data set's verifier raised on the answer, which scored 0",
}
WHY_DROPPED = {
    "reward_failed": "fewer than two samples of the group have a reward",
    "generation_failed": "a generator could not make a sample",
    "zero_variance": "all rewards of the group are equal: nothing to learn, another group was drawn",
    "too_stale": "older than maxStalenessSteps allows",
    "run_ended": "the run ended first",
}
COLOURS = {"busy": "#2a9d5c", "pipeline": "#e9b44c", "weights": "#4a7bd0", "skew": "#b8509e", "other": "#a8adb5"}
INK, LINE, SOFT = "#1f2933", "#3b7fce", "#9db8d6"
SEVERAL = (LINE, "#d98a2b", "#2a9d5c", "#b8509e", "#c2452d", "#3a9fa8", "#8a6d3b", "#7a6fd0")
"""Colours of lines that stand beside each other."""
CHART_HEIGHT_PX = 300
TIMELINE_HEIGHT_PX = 130
FEW_REPLICAS = 10
"""Up to so many the axis counts one by one."""
REASON_CHARS = 60
"""A line of a reason, as wide as fits beside the pointer."""
MOST_TEXT_CHARS = 4000
"""Of a prompt or a turn: `streamrl samples --full` has it whole."""
MOST_POINTS = 1200
"""Of a line, more than a screen has columns: a page stays small however long a run is."""
ADVISED_WAIT = 0.1
"""Share of a process's wall from which on a cause of idleness is worth advice."""
SMOOTHING = 0.15
"""Weight of the newest step in the smoothed line."""


def _shown(value: object) -> object:
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def environment(*packages: str, layout: str) -> Environment:
    """The templates of these packages and of this one, on pages like `layout`.

    All text is escaped; what would be hidden or turn the direction is shown as its escape; what is not there is an error.
    """
    loader = ChoiceLoader([PackageLoader(package) for package in (*packages, "streamrl_cli.reporting")])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown)
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    found.globals.update(layout=layout, key=COLOURS)
    return found


_TEMPLATES = environment(layout="page.html")


def drawn(charts: Iterable[Chart], *more: Figure) -> dict[str, Any]:
    """What a template needs of its charts; `more`: figures that it names itself, behind them."""
    named = list(charts)
    return {"charts": [(name, text) for name, text, _ in named], "figures": [*(one for _, _, one in named), *more]}


def render_page(template: str, *, plotly_js: str, **values: object) -> str:
    """A page in one file as HTML text."""
    scripts = {"plotly_js": plotly_js, "draw_js": asset(DRAW_JS)}
    page = _TEMPLATES.get_template(template).render(
        policy=_policy(scripts.values()),
        style=Markup(asset(STYLE)),  # noqa: S704 - our own
        **{name: Markup(script) for name, script in scripts.items()},  # noqa: S704 - our own
        **values,
    )
    return page.encode(errors="replace").decode()  # half a surrogate pair has no UTF-8


@cache
def asset(name: str) -> str:
    """A file of `static`."""
    return (files("streamrl_cli.reporting") / "static" / name).read_text(encoding="utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """Content-Security-Policy: these scripts and no others, no connection. Plotly sets styles of elements."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render(run: RunData, *, plotly_js: str) -> str:
    """The page of a run as HTML text."""
    title = run.folder.job.metadata.name
    return render_page("overview.html", title=title, plotly_js=plotly_js, **overview(run, timelines=run.timelines))


def overview(run: RunData, *, timelines: Sequence[Timeline] = ()) -> dict[str, Any]:
    """What the page of a run shows; `timelines`: those that are drawn on it."""
    return {
        **drawn(all_charts(run), *map(timeline, timelines)),
        "folder": run.folder.name,
        "processes": [line.process for line in timelines],
        "parts": PARTS,
        "samples": [shown_sample(sample) for sample in run.samples],
        "no_samples": run.no_samples,
        "cards": _cards(run),
        "sizes": list(_sizes(run)),
        "lost": list(_lost(run)),
        "walls": list(_walls(run)),
        "waits": list(_waits(run)),
        "weights_head": [name.lower() for name in HEAD],
        "weights": list(_weights(run)),
        "job": json.dumps(run.folder.job.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1),
    }


def _weights(run: RunData) -> Iterator[tuple[str, ...]]:
    """Yield the measured rows, and after them those of the plan; nothing where nothing was measured."""
    measured = measured_rows(run.steps, job=run.folder.job)
    yield from measured
    if measured and run.weight_times is not None:
        yield from ((f"{where}, estimated", *parts) for where, *parts in estimated_rows(run.weight_times))


def shown_sample(sample: ShownSample) -> tuple[str, str, list[tuple[str, str]]]:
    """Title, numbers, texts."""
    return sample.title(), sample.facts(), [(name, _cut(text)) for name, text in sample.texts()]


def _cut(text: str) -> str:
    """Its beginning, and how much there is behind it."""
    return (
        text
        if len(text) <= MOST_TEXT_CHARS
        else f"{text[:MOST_TEXT_CHARS]} … {len(text) - MOST_TEXT_CHARS} more characters"
    )


def _cards(run: RunData) -> dict[str, str]:
    evaluations, steps = run.evaluations, run.steps
    elapsed_s = steps[-1]["elapsed_s"] if steps else None
    held_out = (
        " → ".join(format_number(e["mean_reward"], digits=2) for e in (evaluations[0], evaluations[-1]))
        if evaluations
        else "–"
    )
    tokens = sum(line["tokens"] for line in steps)
    losses = held_out_losses(steps)
    loss = {"held-out loss": " → ".join(format_number(losses[at]) for at in (0, -1))} if losses else {}
    return loss | {
        "held-out reward": held_out,
        "steps": f"{run.taken} / {run.folder.job.spec.pipeline.steps}",
        **({"of these without numbers": run.lost_lines} if run.lost_lines else {}),
        "time of training": format_seconds(elapsed_s),
        "tokens trained": format_count(tokens),
        "tokens/s, of all": format_count(tokens / elapsed_s if elapsed_s else None),
        "ended": run.result["status"] if run.result else "not yet",
    }


def _walls(run: RunData) -> Iterator[tuple[str, ...]]:
    """Process, wall, share of each part, main cause of `pipeline`."""
    for line in run.timelines:
        shares = bubble_shares(line.totals_s, wall_s=line.wall_s)
        main, _ = main_wait(line.totals_s, wall_s=line.wall_s)
        yield (line.process, format_seconds(line.wall_s), *(f"{shares[part]:.1%}" for part in PARTS), main or "–")
    ratios = weighted_bubbles(run)
    yield ("all, weighted by costPerHour", "", *(f"{ratios[part]:.1%}" for part in PARTS), "")


def _waits(run: RunData) -> Iterator[tuple[str, str]]:
    """Yield the causes for which some process was idle most, and what helps; the largest first."""
    found: dict[str, float] = {}
    for line in run.timelines:
        cause, share = main_wait(line.totals_s, wall_s=line.wall_s)
        found[cause] = max(share, found.get(cause, 0.0))
    for cause in sorted(found, key=lambda cause: -found[cause]):
        if cause in WAITS and found[cause] >= ADVISED_WAIT:
            yield cause, WAITS[cause]


def _sizes(run: RunData) -> Iterator[tuple[str, ...]]:
    """Every change of a pool's size with its reason."""
    for line in run.scaling:
        after = format_seconds(line["time_s"] - run.scaling[0]["time_s"])
        yield line["pool"], after, f"{line['from']} → {line['to']}", line["reason"]


def _lost(run: RunData) -> Iterator[tuple[str, str, int, str]]:
    """Scores that failed by kind and groups that were dropped by reason, with their meaning."""
    for key, count in _largest_first(run.score_failures):
        meaning, first = WHY_NO_SCORE.get(key, ""), run.score_errors.get(key)
        yield "scores failed", key, count, f"{meaning}; the first: {first}" if first else meaning
    for key, count in _largest_first(run.dropped):
        yield "groups dropped", key, count, WHY_DROPPED.get(key, "")


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


REWARD_BY_TASK = "Mean reward of each task of the mixture, smoothed; points are held-out."


def all_charts(run: RunData) -> list[Chart]:
    """In the order of the page."""
    charts = [
        (
            "Reward",
            "Mean reward of the step's samples, and of greedy answers to held-out prompts.",
            reward(run.steps if _has_rewards(run) else (), run.evaluations),
        ),
        ("Loss", "Cross-entropy in nats a token, before the step and of held-out answers behind it.", _losses(run)),
        ("Reward by task", REWARD_BY_TASK, reward_tasks(run.steps, run.evaluations)),
        ("Reward by part", "Mean of each reward before its weight, smoothed.", reward_parts(run)),
        (
            "Length of completions",
            "Tokens: mean and longest of each step.",
            _lines_of(run, {"mean": "length_mean", "longest": "length_max"}),
        ),
        ("Throughput", "Tokens trained a second.", _lines_of(run, {"tokens/s": "tokens_per_s"})),
        (
            "Devices of the trainer",
            "Model FLOPs utilisation while the trainer computes (0: the device's peak is not known), and share of padding.",
            _told_by_trainer(run, {"utilisation": "mfu", "padding": "padding_share"}),
        ),
        (
            "Passes",
            "Seconds of each step by part, mean of the ranks. Collectives run within forward and backward.",
            _told_by_trainer(
                run, {part: f"{part}_seconds" for part in ("data", "forward", "backward", "collectives", "optimiser")}
            ),
        ),
        (
            "Staleness",
            "Age in steps of the samples of each step.",
            _lines_of(run, {"mean": "staleness_mean", "max": "staleness_max"}),
        ),
        (
            "Replay",
            "Samples that each step trained again, and how often these have been by now.",
            _told_by_trainer(run, {"samples": "replayed_samples", "mean reuses": "replay_reuses_mean"}),
        ),
        ("Queue", "Samples that wait for a slot, at the end of each step.", _lines_of(run, {"waiting": "queue"})),
        ("Generators", "Replicas wanted of each elastic pool; the reason stands at each change.", replicas(run)),
        ("Gradient norm", "Before clipping.", _gradient_norm(run)),
        (
            "Train-infer log-prob difference",
            "Mean of |trainer's - generator's log-prob| by pool and version lag. At lag 0 it is the generator's arithmetic alone; "
            "beyond, the policy's own steps are in it.",
            _by_pool_and_lag(run, logprob_diff.MEAN),
        ),
        (
            "Sequences outside the clip",
            "Share of the sequences whose ratio is outside the clip at every token, by pool and version lag.",
            _by_pool_and_lag(run, logprob_diff.CLIPPED),
        ),
    ]
    return [chart for chart in charts if any(value is not None for trace in chart[2]["data"] for value in trace["y"])]


_HELD_OUT = (("mean_reward", "held-out, greedy", "#c2452d"), ("sampled_reward", "held-out, sampled", "#d98a2b"))


def reward(lines: Sequence[Any], evaluations: Sequence[Any]) -> Figure:
    """Training reward by step, smoothed too, with the held-out evaluations."""
    lines = [line for line in lines if line["reward_mean"] is not None]
    steps, values = [line["step"] + 1 for line in lines], [line["reward_mean"] for line in lines]
    evaluated = [e["step"] for e in evaluations]
    return figure(
        [
            trace(steps, values, name="train", colour=SOFT, width=1),
            trace(steps, smooth(values), name="train, smoothed", colour=LINE, width=2.5),
            *(
                {
                    "x": evaluated,
                    "y": [e.get(key) for e in evaluations],
                    "name": name,
                    "mode": "lines+markers",
                    "line": {"color": colour, "width": 2},
                    "marker": {"size": 8},
                }
                for key, name, colour in _HELD_OUT
                if any(e.get(key) is not None for e in evaluations)
            ),
        ]
    )


def _has_rewards(run: RunData) -> bool:
    """Whether the samples that are trained have some."""
    supervised = run.folder.job.spec.algorithm.supervised
    return supervised is None or supervised.reward_field is not None


def _losses(run: RunData) -> Figure:
    """Of a supervised run; any other's loss says nothing to the eye."""
    if run.folder.job.spec.algorithm.supervised is None:
        return figure([])
    told = [(line["step"] + 1, line.get("trainer", {})) for line in run.steps]
    train = [(step, one["loss"]) for step, one in told if "loss" in one]
    held_out = [(step, one["held_out_loss"]) for step, one in told if "held_out_loss" in one]
    return figure(
        [
            trace([step for step, _ in points], [loss for _, loss in points], name=name, colour=colour)
            for name, points, colour in (("train", train, SOFT), ("held-out", held_out, LINE))
        ]
    )


def reward_parts(run: RunData) -> Figure:
    """Mean of each part of the reward by step, smoothed; no lines where one reward is all there is."""
    tasks = run.folder.job.spec.task.tasks
    names = [f"{task.name}/{part.name}".removeprefix("/") for task in tasks for part in task.rewards]
    if len(names) == len(tasks):
        return figure([])
    colours = zip(names, cycle(SEVERAL), strict=False)
    rows = {name: [line.get("reward_parts", {}).get(name) for line in run.steps] for name in names}
    steps = [line["step"] + 1 for line in run.steps]
    return figure([_smoothed(steps, rows[name], name=name, colour=colour) for name, colour in colours])


def reward_tasks(lines: Sequence[Any], evaluations: Sequence[Any]) -> Figure:
    """Mean reward of each task of a mixture by step, smoothed, with its held-out evaluations; no lines without a mixture."""
    steps, evaluated = [line["step"] + 1 for line in lines], [line["step"] for line in evaluations]
    traces = []
    names = dict.fromkeys(name for line in lines for name in line.get("tasks", {}))
    for name, colour in zip(names, cycle(SEVERAL), strict=False):
        means = [line.get("tasks", {}).get(name, {}).get("reward_mean") for line in lines]
        held_out = [line.get("tasks", {}).get(name, {}).get("mean_reward") for line in evaluations]
        points = trace(evaluated, held_out, name=f"{name}, held-out", colour=colour)
        traces += [_smoothed(steps, means, name=name, colour=colour), points | {"mode": "markers"}]
    return figure(traces)


def _smoothed(steps: Sequence[int], values: Sequence[float | None], *, name: str, colour: str) -> dict[str, Any]:
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    means = smooth([value for _, value in known])
    return trace([step for step, _ in known], means, name=name, colour=colour, width=2)


def replicas(run: RunData) -> Figure:
    """Wanted replicas of each elastic pool over time in minutes, as stairs, with the reason of each change."""
    if not run.scaling:
        return figure([])
    start_s, end_s = run.scaling[0]["time_s"], max(line.get("time_s", 0.0) for line in (*run.steps[-1:], *run.scaling))
    rows = [((line["time_s"] - start_s), line["pool"], line["to"], line["reason"]) for line in run.scaling]
    found = size_chart(rows, end_s=end_s - start_s)
    found["layout"]["yaxis"] |= {"dtick": 1} if max(line["to"] for line in run.scaling) <= FEW_REPLICAS else {}
    found["layout"] |= {"hovermode": "closest", "showlegend": True}
    return found


def size_chart(changes: Sequence[tuple[float, str, int, str]], *, end_s: float) -> Figure:
    """Of changes (seconds, pool, replicas from then on, reason): a line of stairs for each pool, in minutes."""
    pools = dict.fromkeys(pool for _, pool, _, _ in changes)
    traces = []
    for name, colour in zip(pools, cycle(SEVERAL), strict=False):
        rows = [(at_s, replicas, reason) for at_s, pool, replicas, reason in changes if pool == name]
        rows.append((end_s, rows[-1][1], ""))
        stairs = {
            "text": ["<br>".join(map(label, wrap(reason, REASON_CHARS))) for _, _, reason in rows],
            "hovertemplate": "%{y} generators<br>%{text}",
            "mode": "lines+markers",
            "line": {"color": colour, "width": 2, "shape": "hv"},
        }
        x, y = [round(at_s / 60, 4) for at_s, _, _ in rows], [replicas for _, replicas, _ in rows]
        traces.append(trace(x, y, name=name, colour=colour) | stairs)
    return figure(traces, x_title="minutes")


def label(text: str) -> str:
    """A text of others as a label: Plotly reads some HTML in them (links, line breaks)."""
    return escape(plain(text), quote=False)


def timeline(line: Timeline) -> Figure:
    """Stacked shares of the wall over time for one process."""
    found = stacked(line.minutes, line.shares, x_title="minutes", height_px=TIMELINE_HEIGHT_PX)
    for bar in found["data"]:
        bar |= {"width": line.bin_minutes, "showlegend": False}
    found["layout"] |= {"bargap": 0}
    found["layout"]["yaxis"] |= {"nticks": 3}
    return found


def stacked(x: Sequence[object], shares: Mapping[str, Sequence[float]], *, x_title: str, height_px: int) -> Figure:
    """Shares of the wall at each place of `x`, a bar a part."""
    bars = [
        {"type": "bar", "x": x, "y": shares[part], "name": part, "marker": {"color": COLOURS[part]}} for part in PARTS
    ]
    found = figure(bars, x_title=x_title, height_px=height_px)
    found["layout"] |= {"barmode": "stack"}
    found["layout"]["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    return found


def _lines_of(run: RunData, columns: Mapping[str, str]) -> Figure:
    series = {name: [cast(float | None, line.get(column)) for line in run.steps] for name, column in columns.items()}
    return lines_by_step([line["step"] for line in run.steps], series)


def lines_by_step(steps: Sequence[int], series: Mapping[str, Sequence[float | None]]) -> Figure:
    """A line for each name, with its value at each step."""
    x = [step + 1 for step in steps]
    return figure(
        [
            trace(x, values, name=name, colour=colour)
            for (name, values), colour in zip(series.items(), cycle(SEVERAL), strict=False)
        ]
    )


def _gradient_norm(run: RunData) -> Figure:
    if not run.folder.job.spec.has_model:
        return figure([])  # it says 0 at each step, since it has no gradient
    return _told_by_trainer(run, {"gradient_norm": "gradient_norm"})


def _told_by_trainer(run: RunData, metrics: Mapping[str, str]) -> Figure:
    """Of the steps whose trainer told them."""
    told = {
        line["step"]: line["trainer"] for line in run.steps if set(metrics.values()) <= set(line.get("trainer", {}))
    }
    return lines_by_step(list(told), {name: [one[metric] for one in told.values()] for name, metric in metrics.items()})


def _by_pool_and_lag(run: RunData, measure: str) -> Figure:
    """A line for each of the job's pools and lags that had tokens; gaps where a step had none."""
    rows = [logprob_diff.read(line.get("trainer", {}), measure=measure) for line in run.steps]
    known = logprob_diff.pool_lags([pool.name for pool in run.folder.job.spec.generators])
    series = {f"{at.pool}, lag {at.lag}": [row.get(at) for row in rows] for at in known}
    found = {name: values for name, values in series.items() if any(value is not None for value in values)}
    return lines_by_step([line["step"] for line in run.steps], found)


def trace(x: Sequence[float], y: Sequence[float | None], *, name: str, colour: str, width: float = 2) -> dict[str, Any]:
    """A line; of a long one the lowest and the highest point of each stretch."""
    kept = _drawn(y) if len(y) > MOST_POINTS else range(len(y))
    line = {"color": colour, "width": width}
    return {
        "x": [x[at] for at in kept],
        "y": [y[at] for at in kept],
        "name": label(name),
        "mode": "lines",
        "line": line,
    }


def _drawn(values: Sequence[float | None]) -> list[int]:
    """Which of many values are drawn; gaps stay where a whole stretch has none."""
    stretch = 2 * len(values) / MOST_POINTS
    kept: set[int] = set()
    for number in range(MOST_POINTS // 2):
        places = range(round(number * stretch), round((number + 1) * stretch))
        known = [(value, at) for at in places if (value := values[at]) is not None]
        kept.update((min(known)[1], max(known)[1]) if known else places[:1])
    return sorted(kept | {0, len(values) - 1})


def smooth(values: Sequence[float]) -> list[float]:
    """A mean in which the newest value has the weight `SMOOTHING`."""
    smoothed: list[float] = []
    for value in values:
        before = smoothed[-1] if smoothed else value
        smoothed.append(before + SMOOTHING * (value - before))
    return smoothed


def figure(traces: list[dict[str, Any]], *, x_title: str = "step", height_px: int = CHART_HEIGHT_PX) -> Figure:
    """Traces on axes in the dress of the page."""
    layout = {
        "height": height_px,
        "margin": {"l": 56, "r": 16, "t": 8, "b": 40},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {"title": {"text": x_title}, "gridcolor": "#eef1f4", "zeroline": False},
        "yaxis": {"gridcolor": "#eef1f4", "zeroline": False, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "hovermode": "x unified",
    }
    return {"data": traces, "layout": layout}
