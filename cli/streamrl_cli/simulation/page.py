"""A simulation's result as one self-contained HTML page with charts, in the dress of a run's report. Pure."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle, pairwise
from typing import Any

from streamrl_cli.reporting.charts import CHART_HEIGHT_PX, COLOURS, INK, SEVERAL, Figure
from streamrl_cli.reporting.page import STYLE
from streamrl_cli.simulation.table import lines

_PARTS = ("busy", "pipeline", "weights", "skew", "other")


def render(found: Mapping[str, Any], *, title: str, plotly_js: str) -> str:
    """The page as HTML text, of what `results.summary` gives."""
    charts = [
        ("Sizes of the pools", "Replicas over time, in minutes.", _sizes(found)),
        (
            "Time of a step",
            "Seconds between two records, and from first admission to last end of its samples.",
            _times(found),
        ),
        ("Bubbles", "Share of the wall of all processes of a kind.", _bubbles(found)),
        ("Length", "Mean tokens of a completion.", _lengths(found)),
        ("Staleness", "Age of the groups of each step, in steps.", _staleness(found)),
    ]
    cards = "".join(
        f'<div class="chart"><h3>{escape(name)}</h3><p>{escape(text)}</p><div id="f{number}"></div></div>'
        for number, (name, text, _) in enumerate(charts)
    )
    data = json.dumps([figure for _, _, figure in charts], separators=(",", ":")).replace("</", "<\\/")
    draw = "F.forEach((f,i)=>Plotly.newPlot('f'+i,f.data,f.layout,{displayModeBar:false,responsive:true}));"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)} - StreamRL</title>'
        f"<style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1><p>simulated</p>"
        f'<pre>{escape(chr(10).join(lines(found)))}</pre><div class="grid">{cards}</div></main>'
        f"<script>{plotly_js}</script><script>const F={data};{draw}</script></body></html>"
    )


def _sizes(found: Mapping[str, Any]) -> Figure:
    by_pool: dict[str, list[Mapping[str, Any]]] = {}
    for change in found["sizes"]:
        by_pool.setdefault(change["pool"], []).append(change)
    end_min = found["virtual_s"] / 60
    traces = []
    for (pool, changes), colour in zip(by_pool.items(), cycle(SEVERAL), strict=False):
        x = [*(change["at_s"] / 60 for change in changes), end_min]
        y = [*(change["replicas"] for change in changes), changes[-1]["replicas"]]
        traces.append(_line(x, y, name=pool, colour=colour) | {"line": {"color": colour, "width": 2, "shape": "hv"}})
    return _figure(traces, x_title="minutes")


def _times(found: Mapping[str, Any]) -> Figure:
    rows = found["by_step"]
    ends = [0.0, *(row["at_s"] for row in rows)]
    intervals = [now - before for before, now in pairwise(ends)]
    return _by_step(rows, {"step": intervals, "makespan": [row["makespan_s"] for row in rows]})


def _lengths(found: Mapping[str, Any]) -> Figure:
    rows = found["by_step"]
    return _by_step(rows, {"mean": [row["tokens"] / row["samples"] for row in rows]})


def _staleness(found: Mapping[str, Any]) -> Figure:
    rows = found["by_step"]
    series = {"mean": "staleness_mean", "max": "staleness_max"}
    return _by_step(rows, {name: [row[column] for row in rows] for name, column in series.items()})


def _bubbles(found: Mapping[str, Any]) -> Figure:
    kinds = list(found["bubbles"])
    bars = [
        {
            "type": "bar",
            "x": kinds,
            "y": [found["bubbles"][kind][part] for kind in kinds],
            "name": part,
            "marker": {"color": COLOURS[part]},
        }
        for part in _PARTS
    ]
    figure = _figure(bars, x_title="")
    figure["layout"] |= {"barmode": "stack"}
    figure["layout"]["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    return figure


def _by_step(rows: Sequence[Mapping[str, Any]], series: Mapping[str, Sequence[float]]) -> Figure:
    steps = [row["step"] + 1 for row in rows]
    traces = [
        _line(steps, values, name=name, colour=colour)
        for (name, values), colour in zip(series.items(), cycle(SEVERAL), strict=False)
    ]
    return _figure(traces, x_title="step")


def _line(x: Sequence[float], y: Sequence[float], *, name: str, colour: str) -> dict[str, Any]:
    return {"x": list(x), "y": list(y), "name": name, "mode": "lines", "line": {"color": colour, "width": 2}}


def _figure(traces: list[dict[str, Any]], *, x_title: str) -> Figure:
    layout = {
        "height": CHART_HEIGHT_PX,
        "margin": {"l": 56, "r": 16, "t": 8, "b": 40},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "xaxis": {"title": {"text": x_title}, "gridcolor": "#eef1f4", "zeroline": False},
        "yaxis": {"gridcolor": "#eef1f4", "zeroline": False, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": 1.12, "x": 0},
    }
    return {"data": traces, "layout": layout}
