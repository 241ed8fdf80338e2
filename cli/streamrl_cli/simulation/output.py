"""A simulation's result as lines for people, and as one self-contained HTML page in the dress of a run's report. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise
from typing import Any

from streamrl_cli.cluster.output import columns
from streamrl_cli.reporting.page import COLOURS, SEVERAL, Figure, figure, render_page, trace
from streamrl_cli.runner.progress import bubble_shares, format_count
from streamrl_workers.metrics.bubbles import CAUSES

_PARTS = ("busy", "pipeline", "weights", "skew", "other")
_MOST_SIZES = 40
"""Changes of size that are shown; the JSON file has all."""


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of what `results.summary` gives."""
    yield from columns(("", "", ""), list(_totals(found)))[1:]
    yield ""
    yield from columns(("process", "hours", *_PARTS, "pipeline, main cause"), list(_walls(found)))
    yield ""
    ages = ", ".join(f"{age}: {count}" for age, count in found["staleness"].items())
    yield f"staleness in steps: groups  {ages}"
    if found["dropped_groups"]:
        yield "dropped groups  " + ", ".join(f"{reason} {count}" for reason, count in found["dropped_groups"].items())
    if found["lost_samples"] or found["reissued_samples"]:
        yield f"samples lost with their replica {found['lost_samples']}, issued again {found['reissued_samples']}"
    if found["moved_samples"]:
        yield f"samples moved to an emptier replica {found['moved_samples']}"
    yield from _sizes(found)


def _totals(found: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    steady_s = found["steady_step_s"]
    after = "" if steady_s is None else f"{steady_s:.4g} s without the first"
    yield "steps", str(found["steps"]), f"in {found['trained_s']:.6g} s of virtual time"
    yield "step", f"{found['step_s']:.4g} s", after
    yield (
        "makespan of generation",
        f"{found['makespan_s']:.4g} s",
        "first admission to last end of a step's samples, mean",
    )
    yield "samples/s", f"{found['samples_per_s'] or 0:.4g}", f"{found['samples']} samples"
    yield "tokens/s", format_count(found["tokens_per_s"]), f"{format_count(found['tokens'])} tokens"
    yield "cost", f"{found['cost']:.4g}", "of all processes, by costPerHour"


def _walls(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for kind, seconds in found["seconds"].items():
        parts = {part: value for part, value in seconds.items() if part != "wall"}
        shares = bubble_shares(parts, wall_s=seconds["wall"])
        causes = {cause: parts[f"pipeline_{cause}"] for cause in CAUSES}
        main = max(causes, key=lambda cause: causes[cause])
        cells = [f"{shares[part]:.1%}" for part in _PARTS]
        yield (kind, f"{seconds['wall'] / 3600:.4g}", *cells, main if causes[main] else "-")
    ratios = found["bubbles"]["all"]
    yield ("all, by cost", "", *(f"{ratios[part]:.1%}" for part in _PARTS), "")


def _sizes(found: Mapping[str, Any]) -> Iterator[str]:
    sizes: dict[str, int] = {}
    changes = []
    for change in found["sizes"]:
        before = sizes.get(change["pool"])
        sizes[change["pool"]] = change["replicas"]
        if before is not None:
            step = sum(row["at_s"] <= change["at_s"] for row in found["by_step"])
            text = f"{before} -> {change['replicas']} at {change['at_s']:.6g} s, step {step}"
            changes.append(f"pool {change['pool']}: {text} ({change['reason']})")
    yield from changes[:_MOST_SIZES]
    if len(changes) > _MOST_SIZES:
        yield f"... and {len(changes) - _MOST_SIZES} more changes of size"


def render(found: Mapping[str, Any], *, title: str, plotly_js: str) -> str:
    """The page as HTML text, of what `results.summary` gives."""
    charts = [
        ("Sizes of the pools", "Replicas over time, in minutes.", _size_chart(found)),
        (
            "Time of a step",
            "Seconds between two records, and from first admission to last end of its samples.",
            _times(found),
        ),
        ("Bubbles", "Share of the wall of all processes of a kind.", _bubbles(found)),
        ("Length", "Mean tokens of a completion.", _lengths(found)),
        ("Staleness", "Age of the groups of each step, in steps.", _staleness(found)),
    ]
    return render_page(
        "simulation.html",
        title=title,
        figures=[figure for _, _, figure in charts],
        plotly_js=plotly_js,
        charts=[(name, text) for name, text, _ in charts],
        lines=list(lines(found)),
    )


def _size_chart(found: Mapping[str, Any]) -> Figure:
    by_pool: dict[str, list[Mapping[str, Any]]] = {}
    for change in found["sizes"]:
        by_pool.setdefault(change["pool"], []).append(change)
    end_min = found["virtual_s"] / 60
    traces = []
    for (pool, changes), colour in zip(by_pool.items(), cycle(SEVERAL), strict=False):
        x = [*(change["at_s"] / 60 for change in changes), end_min]
        y = [*(change["replicas"] for change in changes), changes[-1]["replicas"]]
        traces.append(trace(x, y, name=pool, colour=colour) | {"line": {"color": colour, "width": 2, "shape": "hv"}})
    return figure(traces, x_title="minutes")


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
    found_figure = figure(bars, x_title="")
    found_figure["layout"] |= {"barmode": "stack"}
    found_figure["layout"]["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    return found_figure


def _by_step(rows: Sequence[Mapping[str, Any]], series: Mapping[str, Sequence[float]]) -> Figure:
    steps = [row["step"] + 1 for row in rows]
    traces = [
        trace(steps, values, name=name, colour=colour)
        for (name, values), colour in zip(series.items(), cycle(SEVERAL), strict=False)
    ]
    return figure(traces, x_title="step")
