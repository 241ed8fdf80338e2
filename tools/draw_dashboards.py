"""Draws a dashboard as a page, from its JSON and a Prometheus' answers: the pictures of docs/dashboards.md. It is no Grafana.

Usage: draw_dashboards.py DASHBOARD.json PROMETHEUS_URL MINUTES PAGE.html [VARIABLE=VALUE ...]

A line on the standard output for each panel without data. `tests/support/drawn_boards.py` makes pictures of the pages; `make pictures` those of the docs.
"""

import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment
from markupsafe import escape

POINTS = 150
ANSWER_S = 30
WINDOW_S = 20
"""Of rates: the pictures show a short run that is scraped each second."""
SCALES: Mapping[str, Sequence[tuple[float, str]]] = {
    "percentunit": ((0.01, " %"),),
    "s": ((1e-6, " µs"), (1e-3, " ms"), (1, " s"), (120, " min"), (7200, " h"), (172_800, " days")),
    "bytes": ((1, " B"), (2**10, " KiB"), (2**20, " MiB"), (2**30, " GiB")),
    "Bps": ((1, " B/s"), (1e3, " kB/s"), (1e6, " MB/s"), (1e9, " GB/s")),
    "ops": ((1, " /s"),),
    "none": ((1, ""),),
    "short": ((1, ""), (1e3, " K"), (1e6, " Mil")),
}
"""Unit of a panel -> from which value on which suffix stands behind the numbers."""
PALETTE = ("#7EB26D", "#EAB839", "#6ED0E0", "#EF843C", "#E24D42", "#1F78C1", "#BA43A9", "#705DA0", "#508642", "#CCA300")
NAMED = {
    "green": "#73BF69",
    "light-red": "#FF7383",
    "red": "#F2495C",
    "dark-red": "#C4162A",
    "orange": "#FF9830",
    "dark-orange": "#FA6400",
    "yellow": "#FADE2A",
    "dark-yellow": "#E0B400",
    "blue": "#5794F2",
    "purple": "#B877D9",
}
"""Grafana's colours: those it chooses, and those that a panel names."""
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ board.title }}</title><style>
body {font: 13px sans-serif; background: #f4f5f5; margin: 8px; color: #24292e}
main {display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: 30px; gap: 6px}
section {background: #fff; border: 1px solid #ddd; border-radius: 2px; padding: 4px 6px; overflow: hidden; display: flex; flex-direction: column}
h1 {font-size: 18px} h2 {font-size: 15px; margin: 4px 0} h3 {font-size: 12px; margin: 0}
b, i {margin: auto; font-size: 30px; font-weight: 500} i {font: 13px sans-serif; color: #888}
td, th {padding: 3px 10px; text-align: left; border-bottom: 1px solid #eee}
</style><h1>{{ board.title }}</h1><script>{{ plotly|safe }}</script><main>
{% for panel, inner in panels %}<{{ "section" if panel.type != "row" else "h2" }} style="grid-column: {{ panel.gridPos.x + 1 }} / span {{ panel.gridPos.w }}; grid-row: {{ panel.gridPos.y + 1 }} / span {{ panel.gridPos.h }}">
{% if panel.type == "row" %}{{ panel.title }}</h2>{% else %}<h3>{{ panel.title }}</h3>{{ (inner or "<i>No data</i>")|safe }}</section>{% endif %}
{% endfor %}</main>
"""

Series = tuple[str, list[float], list[float]]
"""Name, instants, values."""


class Source:
    """A Prometheus, and the time that is shown."""

    def __init__(self, url: str, *, minutes: float, variables: Mapping[str, str]) -> None:
        self._url, self._end_s, self._length_s = url, time.time(), 60 * minutes
        own = {"__rate_interval": f"{WINDOW_S}s", "__range": f"{self._length_s:.0f}s"}
        self._variables = own | dict(variables)

    def series(self, target: Mapping[str, Any]) -> list[Series]:
        """Over the time that is shown."""
        span = {"start": self._end_s - self._length_s, "end": self._end_s, "step": self._length_s / POINTS}
        return [
            (
                _name(one["metric"], target),
                [at for at, _ in one["values"]],
                [float(value) for _, value in one["values"]],
            )
            for one in self._ask("query_range", target, **span)
        ]

    def now(self, target: Mapping[str, Any]) -> list[tuple[Mapping[str, str], float]]:
        """(labels, value) of each."""
        return [(one["metric"], float(one["value"][1])) for one in self._ask("query", target, time=self._end_s)]

    def _ask(self, path: str, target: Mapping[str, Any], **more: float) -> list[dict[str, Any]]:
        expr = target["expr"]
        for name in sorted(self._variables, key=len, reverse=True):
            expr = expr.replace(f"${name}", self._variables[name])
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode({'query': expr, **more})}"
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:  # noqa: S310 - the Prometheus that was named
            return list(json.load(answer)["data"]["result"])


def _name(labels: Mapping[str, str], target: Mapping[str, Any]) -> str:
    legend = target.get("legendFormat", "__auto")
    if legend == "__auto":
        return ", ".join(f"{key}={value}" for key, value in labels.items() if key != "__name__")
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend).strip() or "value"


def _scale(unit: str, value: float) -> tuple[float, str]:
    """By what a number of this size is divided, and what stands behind it."""
    steps = [one for one in SCALES[unit] if one[0] <= abs(value)] or SCALES[unit][:1]
    divisor, suffix = steps[-1]
    return {120: 60, 7200: 3600, 172_800: 86_400}.get(divisor, divisor) if unit == "s" else divisor, suffix


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "–"
    divisor, suffix = _scale(unit, value)
    return f"{value / divisor:.3g}{suffix}" if abs(value / divisor) < 1000 else f"{value / divisor:.0f}{suffix}"


def _inner(panel: Mapping[str, Any], source: Source) -> str:
    """What stands below a panel's title; empty where there is no data."""
    match panel["type"]:
        case "stat":
            found = source.now(panel["targets"][0])
            return f"<b>{_shown(found[0][1], _unit(panel))}</b>" if found else ""
        case "table":
            return _table(panel, source)
        case "bargauge":
            figure = _bars(panel, source)
        case "status-history" | "heatmap":
            figure = _cells(panel, source)
        case _:
            figure = _curves(panel, source)
    if not figure.data:
        return ""
    figure.update_layout(
        margin={"l": 60, "r": 8, "t": 4, "b": 4},
        height=panel["gridPos"]["h"] * 36 - 32,
        template="plotly_white",
        colorway=PALETTE,
        font={"size": 10},
        legend={"orientation": "h", "y": -0.12},
        showlegend=panel["type"] == "timeseries",
    )
    if panel["type"] != "bargauge":
        figure.update_xaxes(tickformat="%H:%M", nticks=panel["gridPos"]["w"] // 2)
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"staticPlot": True}))


def _unit(panel: Mapping[str, Any]) -> str:
    return str(panel["fieldConfig"]["defaults"]["unit"])


def _curves(panel: Mapping[str, Any], source: Source) -> Any:  # noqa: ANN401 - plotly has no types
    series = [one for target in panel["targets"] for one in source.series(target)]
    finite = [abs(value) for _, _, values in series for value in values if math.isfinite(value)]
    divisor, suffix = _scale(_unit(panel), max(finite, default=0))
    custom, limits = panel["fieldConfig"]["defaults"]["custom"], panel["fieldConfig"]["defaults"]
    stacked = custom.get("stacking") is not None
    figure = go.Figure()
    for name, at, values in series if finite else ():
        look = {"stackgroup": "all" if stacked else None, "line": {"color": _colour(panel, name)}}
        scaled = [value / divisor for value in values]
        figure.add_scatter(x=[1000 * one for one in at], y=scaled, name=name, mode="lines", **look)
    least = custom.get("axisSoftMin", limits.get("min"))
    figure.update_xaxes(type="date")
    figure.update_yaxes(ticksuffix=suffix, rangemode="normal" if least is None else "tozero")
    if limits.get("max") is not None:
        figure.update_yaxes(range=[limits["min"] / divisor, limits["max"] / divisor])
    elif finite and max(finite) == min(finite):
        figure.update_yaxes(range=[0, 2 * max(finite) / divisor or 1])
    return figure


def _colour(panel: Mapping[str, Any], name: str) -> str | None:
    for one in panel["fieldConfig"]["overrides"]:
        if one["matcher"]["id"] == "byRegexp" and re.search(one["matcher"]["options"].strip("/"), name):
            colour = one["properties"][0]["value"]["fixedColor"]
            return NAMED.get(colour, colour)
    return None


def _bars(panel: Mapping[str, Any], source: Source) -> Any:  # noqa: ANN401 - plotly has no types
    target, unit = panel["targets"][0], _unit(panel)
    found = sorted(((value, _name(labels, target)) for labels, value in source.now(target)), key=lambda one: one[0])
    figure = go.Figure()
    if found:
        values, names = [value for value, _ in found], [name for _, name in found]
        colours = [_colour(panel, name) or PALETTE[0] for name in names]
        texts = [_shown(value, unit) for value in values]
        figure.add_bar(x=values, y=names, orientation="h", text=texts, marker_color=colours)
        figure.update_xaxes(showticklabels=False)
        figure.update_yaxes(automargin=True)
    return figure


def _cells(panel: Mapping[str, Any], source: Source) -> Any:  # noqa: ANN401 - plotly has no types
    series = [one for target in panel["targets"] for one in source.series(target)]
    is_heat = panel["type"] == "heatmap"
    rows = sorted(series, key=lambda one: float(one[0])) if is_heat else sorted(series)
    instants = sorted({at for _, each, _ in rows for at in each})
    grid = [[dict(zip(at, values, strict=True)).get(one, math.nan) for one in instants] for _, at, values in rows]
    if is_heat:  # buckets are cumulative
        grid = [
            [high - low for high, low in zip(row, below, strict=True)]
            for row, below in zip(grid, [[0.0] * len(instants), *grid[:-1]], strict=True)
        ]
    look = {"colorscale": "Oranges"} if is_heat else {"colorscale": "RdYlGn_r", "zmin": 0, "zmax": 1, "ygap": 2}
    bar = {} if is_heat else {"colorbar": {"tickformat": ".0%"}}
    figure = go.Figure()
    if rows:
        names = [name for name, _, _ in rows]
        figure.add_heatmap(x=[1000 * at for at in instants], y=names, z=grid, **look, **bar)
        figure.update_xaxes(type="date")
        figure.update_yaxes(type="category", automargin=True)
    return figure


def _table(panel: Mapping[str, Any], source: Source) -> str:
    units = {one["matcher"]["options"]: one["properties"][0]["value"] for one in panel["fieldConfig"]["overrides"]}
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for target in panel["targets"]:
        for labels, value in source.now(target):
            key = labels.get("namespace", ""), labels.get("rljob", "")
            unit = units.get(target["legendFormat"], "short")
            lines.setdefault(key, {})[target["legendFormat"]] = _shown(value, unit)
    names = [target["legendFormat"] for target in panel["targets"]]
    head = "".join(f"<th>{name}</th>" for name in ("namespace", "rljob", *names))
    body = (
        "".join(f"<td>{escape(cell)}</td>" for cell in (*key, *(line.get(name, "–") for name in names)))
        for key, line in sorted(lines.items())
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table>" if lines else ""


def main(file: str, url: str, minutes: str, page: str, *variables: str) -> Iterator[str]:
    """Write the page; gives the titles of panels without data."""
    board = json.loads(Path(file).read_text(encoding="utf-8"))
    chosen = {"operator": ".*", "namespace": ".*", "job": ".*", "pool": ".*"} | dict(
        one.split("=", 1) for one in variables
    )
    source = Source(url, minutes=float(minutes), variables=chosen)
    panels = [(panel, "" if panel["type"] == "row" else _inner(panel, source)) for panel in board["panels"]]
    from plotly.offline import get_plotlyjs

    text = Environment(autoescape=True).from_string(PAGE).render(board=board, panels=panels, plotly=get_plotlyjs())
    Path(page).write_text(text, encoding="utf-8")
    return (panel["title"] for panel, inner in panels if panel["type"] != "row" and not inner)


if __name__ == "__main__":
    sys.stdout.writelines(f"{title}\n" for title in main(*sys.argv[1:]))
