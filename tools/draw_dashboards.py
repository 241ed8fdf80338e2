"""Draws a dashboard as a page, from its JSON and a Prometheus' answers: the pictures of docs/dashboards.md. It is no Grafana.

Usage: draw_dashboards.py DASHBOARD.json PROMETHEUS_URL MINUTES PAGE.html [VARIABLE=VALUE ...]
    chromium-headless-shell --no-sandbox --screenshot=PICTURE.png --window-size=1500,1500 PAGE.html
"""

import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment
from markupsafe import escape

POINTS = 200
ANSWER_S = 30
WINDOW_S = 20
"""Of rates: the pictures show a short run that is scraped each second."""
UNITS = {"percentunit": ".0%", "s": ".3s", "bytes": ".3s", "Bps": ".3s"}
PAGE = """<!doctype html><meta charset="utf-8"><title>{{ board.title }}</title><style>
body {font: 13px sans-serif; background: #f4f5f5; margin: 8px; color: #24292e}
main {display: grid; grid-template-columns: repeat(24, 1fr); grid-auto-rows: 30px; gap: 6px}
section {background: #fff; border: 1px solid #ddd; border-radius: 2px; padding: 4px 6px; overflow: hidden}
h1 {font-size: 18px} h2 {font-size: 15px; margin: 4px 0} h3 {font-size: 12px; margin: 0} b {font-size: 26px; font-weight: 500; display: block; text-align: center}
td, th {padding: 3px 12px; text-align: left}
</style><h1>{{ board.title }}</h1><script>{{ plotly|safe }}</script><main>
{% for panel, inner in panels %}<{{ "section" if panel.type != "row" else "h2" }} style="grid-column: {{ panel.gridPos.x + 1 }} / span {{ panel.gridPos.w }}; grid-row: {{ panel.gridPos.y + 1 }} / span {{ panel.gridPos.h }}">
{% if panel.type == "row" %}{{ panel.title }}</h2>{% else %}<h3>{{ panel.title }}</h3>{{ inner|safe }}</section>{% endif %}
{% endfor %}</main>
"""


class Source:
    """A Prometheus, and the time that is shown."""

    def __init__(self, url: str, *, minutes: float, variables: Mapping[str, str]) -> None:
        self._url, self._end_s, self._length_s = url, time.time(), 60 * minutes
        own = {"__rate_interval": f"{WINDOW_S}s", "__range": f"{self._length_s:.0f}s"}
        self._variables = own | dict(variables)

    def series(self, target: Mapping[str, Any]) -> list[tuple[str, list[float], list[float]]]:
        """(name, instants, values) of each."""
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
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), legend).strip()


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:{UNITS[unit]}}" if unit == "percentunit" else f"{value:.4g}"


def _inner(panel: Mapping[str, Any], source: Source) -> str:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    match panel["type"]:
        case "stat":
            found = source.now(panel["targets"][0])
            return f"<b>{_shown(found[0][1], unit) if found else '–'}</b>"
        case "table":
            return _table(panel, source)
    figure = go.Figure(list(_traces(panel, source)))
    figure.update_layout(
        margin={"l": 50, "r": 8, "t": 4, "b": 4},
        height=panel["gridPos"]["h"] * 36 - 32,
        template="plotly_white",
        font={"size": 10},
        legend={"orientation": "h", "y": -0.12},
        showlegend=panel["type"] == "timeseries",
        yaxis={
            "tickformat": UNITS.get(unit),
            "range": [0, 1]
            if panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"].get("max") == 1
            else None,
        },
        xaxis={"type": "date" if panel["type"] != "bargauge" else None},
    )
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"staticPlot": True}))


def _traces(panel: Mapping[str, Any], source: Source) -> Iterator[Any]:
    if panel["type"] == "bargauge":
        target = panel["targets"][0]
        found = sorted(((value, _name(labels, target)) for labels, value in source.now(target)), key=lambda one: one[0])
        yield go.Bar(x=[value for value, _ in found], y=[name for _, name in found], orientation="h")
        return
    series = [one for target in panel["targets"] for one in source.series(target)]
    if panel["type"] in ("status-history", "heatmap"):
        yield _cells(panel, series)
        return
    stacked = panel["fieldConfig"]["defaults"]["custom"].get("stacking") is not None
    for name, at, values in series:
        look = {"stackgroup": "all" if stacked else None, "line": {"color": _colour(panel, name)}}
        yield go.Scatter(x=[1000 * one for one in at], y=values, name=name or "value", mode="lines", **look)


def _colour(panel: Mapping[str, Any], name: str) -> str | None:
    for one in panel["fieldConfig"]["overrides"]:
        if one["matcher"]["id"] == "byRegexp" and re.match(one["matcher"]["options"].strip("/"), name):
            return str(one["properties"][0]["value"]["fixedColor"])
    return None


def _cells(panel: Mapping[str, Any], series: list[tuple[str, list[float], list[float]]]) -> Any:  # noqa: ANN401 - plotly has no types
    rows = sorted(series) if panel["type"] == "status-history" else sorted(series, key=lambda one: float(one[0]))
    instants = sorted({at for _, each, _ in rows for at in each})
    grid = [[dict(zip(at, values, strict=True)).get(one, math.nan) for one in instants] for _, at, values in rows]
    if panel["type"] == "heatmap":  # buckets are cumulative
        grid = [
            [high - low for high, low in zip(row, below, strict=True)]
            for row, below in zip(grid, [[0.0] * len(instants), *grid[:-1]], strict=True)
        ]
    colours = "RdYlGn_r" if panel["type"] == "status-history" else "Oranges"
    ranged = {"zmin": 0, "zmax": 1} if panel["type"] == "status-history" else {}
    return go.Heatmap(
        x=[1000 * at for at in instants], y=[name for name, _, _ in rows], z=grid, colorscale=colours, **ranged
    )


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
        for key, line in lines.items()
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in body)}</table>"


def main(file: str, url: str, minutes: str, page: str, *variables: str) -> None:
    """Write the page."""
    board = json.loads(Path(file).read_text(encoding="utf-8"))
    chosen = {"operator": ".*", "namespace": ".*", "job": ".*", "pool": ".*"} | dict(
        one.split("=", 1) for one in variables
    )
    source = Source(url, minutes=float(minutes), variables=chosen)
    panels = [(panel, "" if panel["type"] == "row" else _inner(panel, source)) for panel in board["panels"]]
    from plotly.offline import get_plotlyjs

    text = Environment(autoescape=True).from_string(PAGE).render(board=board, panels=panels, plotly=get_plotlyjs())
    Path(page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
