"""`streamrl compare RUN RUN...`: reward of several runs against steps, tokens, time and cost.

Runs whose jobs differ in their seed alone are one line, with a 95 % confidence interval over them.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from streamrl.errors import EXIT_DONE, UserError
from streamrl.files import replace_file
from streamrl_cli import console
from streamrl_cli.cluster.output import ABSENT, section
from streamrl_cli.reporting.comparison import (
    EFFORTS,
    GRID_POINTS,
    REWARDS,
    TRAINING,
    Comparison,
    Mean,
    Variant,
    compare,
)
from streamrl_cli.reporting.data import read_run
from streamrl_cli.reporting.page import PLOTLY_JS, SEVERAL, Figure, asset, drawn, figure, render_page, trace
from streamrl_cli.runner.progress import PARTS, format_count, format_seconds

_TEXTS = {
    "greedy": "held-out reward of greedy answers",
    "sampled": "held-out reward of sampled answers",
    TRAINING: "mean reward of the samples of each step",
}
_MOST_VARIANTS = 26


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl compare`."""
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="a run folder; the first one's job is the base"
    )
    parser.add_argument(
        "--reward", choices=(*REWARDS, TRAINING), help="which reward (default: greedy, where all have it)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write charts as one HTML page")


def run(args: argparse.Namespace) -> int:
    """Print the tables; write the page if it was asked for."""
    found = compare([read_run(path) for path in args.runs], reward=args.reward)
    if len(found.variants) > _MOST_VARIANTS:
        raise UserError(
            field="RUN", rule=f"must be of at most {_MOST_VARIANTS} different jobs", got=len(found.variants)
        )
    console.out(*lines(found))
    if args.plot is not None:
        replace_file(args.plot, render(found, plotly_js=asset(PLOTLY_JS)).encode())
    return EXIT_DONE


def lines(found: Comparison) -> Iterator[str]:
    """The tables as text."""
    yield f"{_TEXTS[found.reward]}; mean over runs ± half of its 95 % interval"
    for name, variant in _named(found):
        yield f"{name}: {variant.label}"
    for title, head, rows in tables(found):
        yield from section(title, head, rows)


def tables(found: Comparison) -> list[tuple[str, Sequence[str], list[tuple[str, ...]]]]:
    """(title, head, rows)."""
    budgets, goal = found.budgets, found.goal
    named = list(_named(found))
    at = [f"at {_effort_text(effort, budgets[effort])}" for effort in EFFORTS]
    rewards = [
        (
            name,
            str(len(one.runs)),
            *(_text(one.at(effort, budgets[effort])) for effort in EFFORTS),
            ABSENT if one is found.variants[0] else _text(found.difference(one), sign="+"),
        )
        for name, one in named
    ]
    reached = [(name, *(_effort_mean(effort, one.first(effort, goal)) for effort in EFFORTS)) for name, one in named]
    speeds = [(name, *_speed(one)) for name, one in named]
    return [
        ("Reward for equal effort", ("", "runs", *at, "beyond A, same seeds"), rewards),
        (
            f"Effort until a reward of {goal:.3f}, which every run reached",
            ("", "steps", "tokens", "time", "cost"),
            reached,
        ),
        ("Speed, and where the wall time went", ("", "samples/s", *PARTS), speeds),
    ]


def _named(found: Comparison) -> Iterator[tuple[str, Variant]]:
    return ((chr(ord("A") + index), variant) for index, variant in enumerate(found.variants))


def _text(value: Mean | None, *, sign: str = "") -> str:
    if value is None:
        return ABSENT
    return f"{value.value:{sign}.3f}" + ("" if value.half_width is None else f" ± {value.half_width:.3f}")


def _effort_text(effort: str, amount: float) -> str:
    """An amount with its unit."""
    return _amount(effort, amount) + ("" if effort == "seconds" else f" {effort}")


def _effort_mean(effort: str, value: Mean | None) -> str:
    if value is None:
        return ABSENT
    return _amount(effort, value.value) + (
        "" if value.half_width is None else f" ± {_amount(effort, value.half_width)}"
    )


def _amount(effort: str, amount: float) -> str:
    if effort == "seconds":
        return format_seconds(amount)
    return f"{amount:.4g}" if effort == "cost" else format_count(amount)


def _speed(variant: Variant) -> Iterator[str]:
    """Samples a second, and the share of each part of the wall: means over the runs."""
    rates = [run.samples_per_s for run in variant.runs if run.samples_per_s is not None]
    yield f"{sum(rates) / len(rates):.1f}" if rates else ABSENT
    for part in PARTS:
        yield f"{sum(run.bubbles[part] for run in variant.runs) / len(variant.runs):.1%}"


def render(found: Comparison, *, plotly_js: str) -> str:
    """The page as HTML text."""
    return render_page("compare.html", plotly_js=plotly_js, **shown(found))


def shown(found: Comparison) -> dict[str, Any]:
    """What the page shows."""
    titles = {"steps": "steps", "tokens": "tokens trained", "seconds": "seconds", "cost": "cost"}
    return {
        **drawn((f"Reward against {titles[one]}", "", chart(found, one, x_title=titles[one])) for one in EFFORTS),
        "title": "Comparison",
        "text": _TEXTS[found.reward],
        "variants": [(name, one.label, ", ".join(run.name for run in one.runs)) for name, one in _named(found)],
        "tables": tables(found),
    }


def chart(found: Comparison, effort: str, *, x_title: str) -> Figure:
    """Mean reward of each variant against `effort`, with its 95 % interval as a band, as far as all its runs go."""
    traces = []
    for (name, variant), colour in zip(_named(found), cycle(SEVERAL), strict=False):
        begin = max(run.curve.efforts[effort][0] for run in variant.runs)
        width = (variant.spent(effort) - begin) / GRID_POINTS
        points = [begin + width * index for index in range(GRID_POINTS)] + [variant.spent(effort)]
        means = [(x, at) for x in points if (at := variant.at(effort, x)) is not None]
        line = trace([x for x, _ in means], [at.value for _, at in means], name=name, colour=colour)
        traces += [*_band(means, colour=colour), line]
    return figure(traces, x_title=x_title)


def _band(means: Sequence[tuple[float, Mean]], *, colour: str) -> list[dict[str, object]]:
    """The area between the bounds; nothing where there are none."""
    known = [(x, at.value, at.half_width) for x, at in means if at.half_width is not None]
    if not known:
        return []
    bounds = [value + half for _, value, half in known] + [value - half for _, value, half in reversed(known)]
    xs = [x for x, _, _ in known]
    area = {"fill": "toself", "opacity": 0.15, "hoverinfo": "skip", "showlegend": False, "fillcolor": colour}
    return [trace([*xs, *reversed(xs)], bounds, name="", colour=colour, width=0) | area]
