"""A simulation's result as lines for people, and as one self-contained HTML page in the dress of a run's report. Pure."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from streamrl_cli.cluster.output import columns
from streamrl_cli.reporting.page import CHART_HEIGHT_PX, drawn, lines_by_step, render_page, size_chart, stacked
from streamrl_cli.runner.progress import PARTS, bubble_shares, format_count
from streamrl_workers.metrics.bubbles import CAUSES

_MOST_SIZES = 40
"""Changes of size that are shown; the JSON file has all."""


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of what `results.summary` gives."""
    yield from columns(("", "", ""), list(_totals(found)))[1:]
    yield ""
    yield from columns(("process", "hours", *PARTS, "pipeline, main cause"), list(_walls(found)))
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
        cells = [f"{shares[part]:.1%}" for part in PARTS]
        yield (kind, f"{seconds['wall'] / 3600:.4g}", *cells, main if causes[main] else "-")
    ratios = found["bubbles"]["all"]
    yield ("all, by cost", "", *(f"{ratios[part]:.1%}" for part in PARTS), "")


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
    rows, sizes, bubbles = found["by_step"], found["sizes"], found["bubbles"]
    steps = [row["step"] for row in rows]
    ends = [0.0, *(row["at_s"] for row in rows)]
    times = {"step": [now - before for before, now in pairwise(ends)], "makespan": [row["makespan_s"] for row in rows]}
    ages = {name: [row[f"staleness_{name}"] for row in rows] for name in ("mean", "max")}
    changes = [(one["at_s"], one["pool"], one["replicas"], one["reason"]) for one in sizes]
    shares = {part: [ratios[part] for ratios in bubbles.values()] for part in PARTS}
    charts = [
        ("Sizes of the pools", "Replicas over time, in minutes.", size_chart(changes, end_s=found["virtual_s"])),
        (
            "Time of a step",
            "Seconds between two records, and from first admission to last end of its samples.",
            lines_by_step(steps, times),
        ),
        (
            "Bubbles",
            "Share of the wall of all processes of a kind.",
            stacked(list(bubbles), shares, x_title="", height_px=CHART_HEIGHT_PX),
        ),
        (
            "Length",
            "Mean tokens of a completion.",
            lines_by_step(steps, {"mean": [row["tokens"] / row["samples"] for row in rows]}),
        ),
        ("Staleness", "Age of the groups of each step, in steps.", lines_by_step(steps, ages)),
    ]
    return render_page("simulation.html", title=title, plotly_js=plotly_js, lines=list(lines(found)), **drawn(charts))
