"""Charts of a run as Plotly figures (plain dictionaries). Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from textwrap import wrap
from typing import Any

from streamrl_cli.reporting.data import PARTS, RunData, Timeline

Figure = dict[str, Any]

COLOURS = {"busy": "#2a9d5c", "pipeline": "#e9b44c", "weights": "#4a7bd0", "skew": "#b8509e", "other": "#a8adb5"}
INK, LINE, SOFT = "#1f2933", "#2563a8", "#9db8d6"
SEVERAL = (LINE, "#d98a2b", "#2a9d5c", "#b8509e")
"""Colours of lines that stand beside each other."""
CHART_HEIGHT_PX = 300
TIMELINE_HEIGHT_PX = 130
FEW_REPLICAS = 10
"""Up to so many the axis counts one by one."""
REASON_CHARS = 60
"""A line of a reason, as wide as fits beside the pointer."""
SMOOTHING = 0.15
"""Weight of the newest step in the smoothed line."""


def all_charts(run: RunData) -> list[tuple[str, str, Figure]]:
    """(title, what it says, figure), in the order of the page."""
    charts = [
        ("Reward", "Mean reward of the step's samples, and of greedy answers to held-out prompts.", reward(run)),
        ("Reward by part", "Mean of each reward before its weight, smoothed.", reward_parts(run)),
        ("Length of completions", "Tokens: mean and longest of each step.", lengths(run)),
        ("Throughput", "Tokens trained a second.", _lines_of(run, {"tokens/s": "tokens_per_s"})),
        (
            "Staleness",
            "Age in steps of the samples of each step.",
            _lines_of(run, {"mean": "staleness_mean", "max": "staleness_max"}),
        ),
        ("Queue", "Samples that wait for a slot, at the end of each step.", _lines_of(run, {"waiting": "queue"})),
        ("Generators", "Replicas wanted of each elastic pool; the reason stands at each change.", replicas(run)),
        ("Gradient norm", "Before clipping.", _gradient_norm(run)),
    ]
    return [chart for chart in charts if any(value is not None for trace in chart[2]["data"] for value in trace["y"])]


def reward(run: RunData) -> Figure:
    """Training reward by step, smoothed too, with the held-out evaluations."""
    steps = [line["step"] + 1 for line in run.steps]
    values = [line["reward_mean"] for line in run.steps]
    held_out = {"x": [e["step"] for e in run.evaluations], "y": [e["mean_reward"] for e in run.evaluations]}
    return _figure(
        [
            _trace(steps, values, name="train", colour=SOFT, width=1),
            _trace(steps, _smooth(values), name="train, smoothed", colour=LINE, width=2.5),
            {
                **held_out,
                "name": "held-out",
                "mode": "lines+markers",
                "line": {"color": "#c2452d", "width": 2},
                "marker": {"size": 8},
            },
        ]
    )


def reward_parts(run: RunData) -> Figure:
    """Mean of each part of the reward by step, smoothed; no lines where one reward is all there is."""
    names = [part.name for part in run.folder.job.spec.task.rewards]
    if len(names) == 1:
        return _figure([])
    return _figure([_part(run, name, colour=colour) for name, colour in zip(names, cycle(SEVERAL), strict=False)])


def _part(run: RunData, name: str, *, colour: str) -> dict[str, Any]:
    rows = [(line["step"] + 1, line.get("reward_parts", {}).get(name)) for line in run.steps]
    known = [(step, mean) for step, mean in rows if mean is not None]
    means = _smooth([mean for _, mean in known])
    return _trace([step for step, _ in known], means, name=name, colour=colour, width=2)


def lengths(run: RunData) -> Figure:
    """Mean and longest completion by step."""
    return _lines_of(run, {"mean": "length_mean", "longest": "length_max"})


def replicas(run: RunData) -> Figure:
    """Wanted replicas of each elastic pool over time in minutes, as stairs, with the reason of each change."""
    if not run.scaling:
        return _figure([])
    start_s, end_s = run.scaling[0]["time_s"], max(line["time_s"] for line in (*run.steps[-1:], *run.scaling))
    pools = dict.fromkeys(line["pool"] for line in run.scaling)
    traces = [
        _stairs(
            [line for line in run.scaling if line["pool"] == pool], name=pool, colour=colour, within=(start_s, end_s)
        )
        for pool, colour in zip(pools, cycle(SEVERAL), strict=False)
    ]
    layout = _layout(height_px=CHART_HEIGHT_PX, x_title="minutes")
    layout["yaxis"] |= {"dtick": 1} if max(line["to"] for line in run.scaling) <= FEW_REPLICAS else {}
    return {"data": traces, "layout": layout | {"hovermode": "closest", "showlegend": True}}


def _stairs(changes: Sequence[Mapping[str, Any]], *, name: str, colour: str, within: tuple[float, float]) -> Figure:
    start_s, end_s = within
    rows = [(line["time_s"], line["to"], line["reason"]) for line in changes]
    rows.append((end_s, rows[-1][1], ""))
    return {
        "x": [round((at_s - start_s) / 60, 4) for at_s, _, _ in rows],
        "y": [replicas for _, replicas, _ in rows],
        "text": ["<br>".join(wrap(escape(reason), REASON_CHARS)) for _, _, reason in rows],
        "hovertemplate": "%{y} generators<br>%{text}",
        "name": name,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2, "shape": "hv"},
    }


def timeline(line: Timeline) -> Figure:
    """Stacked shares of the wall over time for one process."""
    shared = {"type": "bar", "x": line.minutes, "width": line.bin_minutes, "showlegend": False}
    bars = [{**shared, "y": line.shares[part], "name": part, "marker": {"color": COLOURS[part]}} for part in PARTS]
    layout = _layout(height_px=TIMELINE_HEIGHT_PX, x_title="minutes")
    layout |= {"barmode": "stack", "bargap": 0}
    layout["yaxis"] |= {"range": [0, 1], "tickformat": ".0%", "nticks": 3}
    return {"data": bars, "layout": layout}


def _lines_of(run: RunData, columns: Mapping[str, str]) -> Figure:
    steps = [line["step"] + 1 for line in run.steps]
    colours = (LINE, "#d98a2b")
    return _figure(
        [
            _trace(steps, [line.get(column) for line in run.steps], name=name, colour=colour, width=1.8)
            for (name, column), colour in zip(columns.items(), colours, strict=False)
        ]
    )


def _gradient_norm(run: RunData) -> Figure:
    if run.folder.job.spec.trainer.engine.simulated is not None:
        return _figure([])  # it says 0 at each step, since it has no gradient
    return _trainer_line(run, "gradient_norm")


def _trainer_line(run: RunData, column: str) -> Figure:
    rows = [(line["step"] + 1, line["trainer"][column]) for line in run.steps if column in line.get("trainer", {})]
    return _figure(
        [_trace([step for step, _ in rows], [value for _, value in rows], name=column, colour=LINE, width=1.5)]
    )


def _trace(x: Sequence[float], y: Sequence[float | None], *, name: str, colour: str, width: float) -> dict[str, Any]:
    return {"x": list(x), "y": list(y), "name": name, "mode": "lines", "line": {"color": colour, "width": width}}


def _smooth(values: Sequence[float]) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        before = smoothed[-1] if smoothed else value
        smoothed.append(before + SMOOTHING * (value - before))
    return smoothed


def _figure(traces: list[dict[str, Any]]) -> Figure:
    return {"data": traces, "layout": _layout(height_px=CHART_HEIGHT_PX, x_title="step")}


def _layout(*, height_px: int, x_title: str) -> dict[str, Any]:
    return {
        "height": height_px,
        "margin": {"l": 56, "r": 16, "t": 8, "b": 40},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "xaxis": {"title": {"text": x_title}, "gridcolor": "#eef1f4", "zeroline": False},
        "yaxis": {"gridcolor": "#eef1f4", "zeroline": False, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
        "hovermode": "x unified",
    }
