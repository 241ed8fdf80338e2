"""The pages of `streamrl ui`: which there are, what each shows, and when it has changed.

    /                       runs side by side             /runs/KEY           reward, speed, bubbles, what was lost
    /compare?run=A&run=B    for equal effort              /runs/KEY/timeline  where each process's time went, with zoom
                                                          /runs/KEY/samples   with search
                                                          /runs/KEY/now       dispatch and why, versions and who holds them
                                                          /runs/KEY/events

Whatever stands in a run folder is data: templates escape all of it, and what would be hidden or turn the direction is shown as its escape.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from streamrl.errors import UserError
from streamrl_cli.reporting import compare as comparing
from streamrl_cli.reporting.comparison import compare
from streamrl_cli.reporting.data import process_files
from streamrl_cli.reporting.page import (
    CHART_HEIGHT_PX,
    SEVERAL,
    Figure,
    drawn,
    figure,
    label,
    overview,
    shown_sample,
    stacked,
    timeline,
)
from streamrl_cli.reporting.samples import SampleQuery, of_step, search
from streamrl_cli.reporting.walls import MOST_BINS, SHORTEST_BIN_S, TimeRange, timelines
from streamrl_cli.runner.progress import PARTS
from streamrl_cli.ui.base import TemplatePages, assets
from streamrl_cli.ui.catalog import MOST_RUNS, Catalog, RunLine, stamp_of
from streamrl_cli.ui.state import checkpoints, events, read_status, run_warnings, status_tables
from streamrl_pages.website import Asked, website
from streamrl_workers.stream.sample_choice import FAILED, KINDS

_OVERVIEW, _TIMELINE, _SAMPLES, _NOW, _EVENTS = (
    f"/runs/{{run}}{tail}" for tail in ("", "/timeline", "/samples", "/now", "/events")
)
_TABS = {"Overview": "", "Timeline": "/timeline", "Samples": "/samples", "Now": "/now", "Events": "/events"}
_DRAWN_RUNS = 8
"""As many lines as can be told apart."""
_SHOWN_RUNS = 20
_SAMPLES_SHOWN = 20
_MOST_TEXT_CHARS = 200


def application(folder: Path, *, token: str, names: frozenset[str]) -> Any:  # noqa: ANN401 - an ASGI application
    """The pages about a run, or the runs of a folder. Raises `UserError`: there is no such folder."""
    pages = RunPages(Catalog(folder))
    return website(pages, paths=tuple(pages.shown), assets=assets(), token=token, names=names)


class RunPages(TemplatePages):
    """Pages about the runs of a catalog."""

    home = "Runs"
    keys = (
        "r: runs. n, p: older and newer ones. 1 to 5: the pages of a run. /: search. j, k: next and last sample. "
        "On the timeline: + and -: closer and farther; arrows: earlier and later; 0: all."
    )

    def __init__(self, catalog: Catalog, *, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since the epoch."""
        super().__init__(clock=clock)
        self._catalog = catalog
        self.shown: dict[str, Callable[[Asked, str], str]] = {
            "/": self._runs,
            "/compare": self._compare,
            _OVERVIEW: self._overview,
            _TIMELINE: self._timeline,
            _SAMPLES: self._samples,
            _NOW: self._now,
            _EVENTS: self._events,
        }

    def stamp(self, path: str, asked: Asked) -> str:
        """What a page rests on: the numbers of its runs, and the time where they change each second."""
        paths = self._catalog.paths()
        if path in ("/", "/compare"):
            runs = _PageOfRuns.of(paths, asked).runs if path == "/" else _chosen(paths, asked)
            return f"{len(paths)} " + " ".join(f"{key} {stamp_of(folder)}" for key, folder in runs.items())
        folder = paths.get(asked.parts["run"])
        if folder is None:
            return "gone"
        if path == _SAMPLES:
            return "" if asked.query else stamp_of(folder)
        has_ended = path == _OVERVIEW or (folder / "result.json").exists()
        return stamp_of(folder) + ("" if has_ended else self.beat())

    def _run_page(self, template: str, asked: Asked, *, title: str, state: str, tab: str, **values: Any) -> str:  # noqa: ANN401 - whatever a template shows
        tabs = [(name, f"/runs/{asked.parts['run']}{tail}") for name, tail in _TABS.items()]
        return self.page(template, title=title, state=state, tabs=tabs, tab=tab, **values)

    # ---- several runs

    def _runs(self, asked: Asked, state: str) -> str:
        paths = self._catalog.paths()
        shown = _PageOfRuns.of(paths, asked)
        lines = list(self._catalog.lines(shown.runs))
        chosen = [line for line in lines if (line.key in asked.chosen if asked.chosen else not line.fault)]
        chosen = chosen[:_DRAWN_RUNS]
        charts = [
            ("Reward", "Of the samples of each step, smoothed.", _beside(chosen, "rewards")),
            ("Speed", "Tokens trained a second, smoothed.", _beside(chosen, "speeds")),
            ("Bubbles", "Share of the wall of all processes, weighted by cost.", _bubbles(chosen)),
            ("Cost", "Of all processes, by costPerHour.", _costs(chosen)),
        ]
        return self.page(
            "runs.html",
            title="Runs",
            state=state,
            lines=lines,
            chosen={line.key for line in chosen},
            page=shown,
            count=f"the newest {len(paths)}" if len(paths) == MOST_RUNS else f"{len(paths)}",
            parts=PARTS,
            **drawn(charts if chosen else []),
        )

    def _compare(self, asked: Asked, state: str) -> str:
        chosen = tuple(dict.fromkeys(asked.chosen))
        if not 1 <= len(chosen) <= _DRAWN_RUNS:
            rule = f"must name 1 to {_DRAWN_RUNS} runs"
            raise UserError(field="run", rule=rule, got=str(len(chosen)), fix="choose them in the list of runs")
        found = compare([self._catalog.data(key) for key in chosen])
        return self.page("compare.html", state=state, **comparing.shown(found))

    # ---- one run

    def _overview(self, asked: Asked, state: str) -> str:
        run = self._catalog.data(asked.parts["run"])
        title = run.folder.name
        return self._run_page("overview.html", asked, title=title, state=state, tab="Overview", **overview(run))

    def _timeline(self, asked: Asked, state: str) -> str:
        folder = self._catalog.folder(asked.parts["run"])
        window = _window(asked)
        lines = timelines(process_files(folder), beneath=folder.path, window=window)
        if not lines:
            raise UserError(field=folder.name, rule="has no times of processes yet", fix="wait some seconds")
        half = lines[0].bin_minutes / 2
        shown = TimeRange(start=max(0.0, lines[0].minutes[0] - half), end=lines[0].minutes[-1] + half)
        return self._run_page(
            "timeline.html",
            asked,
            title=folder.name,
            state=state,
            tab="Timeline",
            figures=[timeline(line) for line in lines],
            processes=[line.process for line in lines],
            shown=f"{shown.start:.2f} to {shown.end:.2f} minutes, {60 * lines[0].bin_minutes:.3g} s a bar",
            moves=_moves(shown),
        )

    def _samples(self, asked: Asked, state: str) -> str:
        folder = self._catalog.folder(asked.parts["run"])
        query = asked.query
        text, kind, step = query.get("text", "")[:_MOST_TEXT_CHARS], query.get("kind", ""), _step(query.get("step", ""))
        values: dict[str, Any] = {
            "text": text,
            "kind": kind,
            "step": "" if step is None else step,
            "kinds": ["dropped", *KINDS],
            "note": "",
            "more": "",
        }
        if kind in KINDS and kind != FAILED:
            found = of_step(folder.path, step=step, kinds=(kind,), count=_SAMPLES_SHOWN, text=text)
            unread = (
                f"; in {found.unread} groups it was not looked for, that is too much at once" if found.unread else ""
            )
            note = KINDS[kind] + unread + _missing(found.left_out)
            values |= {"samples": list(map(shown_sample, found.samples)), "note": note}
        else:
            wanted = SampleQuery(text=text, step=step, dropped=kind == "dropped", failed=kind == FAILED)
            result = search(folder.path, wanted, before=_place(query.get("before", "")), count=_SAMPLES_SHOWN)
            note = f"{len(result.samples)} samples, newest first, in {result.looked_at} groups that were looked at"
            values |= {"samples": list(map(shown_sample, result.samples)), "note": note + _missing(result.left_out)}
            if result.next_place is not None:
                on = {"text": text, "kind": kind, "step": values["step"], "before": "{}.{}".format(*result.next_place)}
                values["more"] = f"?{urlencode(on, errors='replace')}"
        return self._run_page("samples.html", asked, title=folder.name, state=state, tab="Samples", **values)

    def _now(self, asked: Asked, state: str) -> str:
        folder = self._catalog.folder(asked.parts["run"])
        status = read_status(folder)
        scheduling = folder.job.spec.scheduling.model_dump(mode="json", by_alias=True, exclude_none=True)
        return self._run_page(
            "now.html",
            asked,
            title=folder.name,
            state=state,
            tab="Now",
            status=status,
            warnings=run_warnings(folder, status),
            checkpoints=checkpoints(folder),
            plan=json.dumps(scheduling, indent=1),
            **({} if status is None else status_tables(status)),
        )

    def _events(self, asked: Asked, state: str) -> str:
        run = self._catalog.data(asked.parts["run"])
        return self._run_page(
            "events.html", asked, title=run.folder.name, state=state, tab="Events", events=events(run)
        )


# ---- figures of several runs


def _beside(lines: list[RunLine], what: str) -> Figure:
    traces = []
    for line, colour in zip(lines, cycle(SEVERAL), strict=False):
        traces.append(getattr(line, what) | {"name": label(line.name), "line": {"color": colour, "width": 2}})
    found = figure(traces)
    found["layout"] |= {"showlegend": True}
    return found


def _bubbles(lines: list[RunLine]) -> Figure:
    shares = {part: [line.bubbles.get(part, 0.0) for line in lines] for part in PARTS}
    return _by_name(stacked([label(line.name) for line in lines], shares, x_title="", height_px=CHART_HEIGHT_PX))


def _costs(lines: list[RunLine]) -> Figure:
    colours = [colour for _, colour in zip(lines, cycle(SEVERAL), strict=False)]
    bars = {
        "type": "bar",
        "x": [label(line.name) for line in lines],
        "y": [line.spent for line in lines],
        "name": "cost",
    }
    return _by_name(figure([bars | {"marker": {"color": colours}}], x_title=""))


def _by_name(found: Figure) -> Figure:
    found["layout"]["xaxis"] |= {"type": "category", "automargin": True}
    found["layout"]["hovermode"] = "closest"
    return found


# ---- what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageOfRuns:
    """A part of the list of runs; the chosen ones are on every page."""

    runs: Mapping[str, Path]
    number: int
    newer: str
    """Address of the page before, empty: there is none."""
    older: str

    @classmethod
    def of(cls, paths: Mapping[str, Path], asked: Asked) -> "_PageOfRuns":
        last = max(1, math.ceil(len(paths) / _SHOWN_RUNS))
        number = min(_step(asked.query.get("page", "")) or 1, last)
        here = dict(islice(paths.items(), (number - 1) * _SHOWN_RUNS, number * _SHOWN_RUNS))
        chosen = _chosen(paths, asked)
        elsewhere = {key: chosen[key] for key in chosen if key not in here}

        def to(page: int) -> str:
            query = urlencode([("page", page), *(("run", key) for key in chosen)])
            return f"/?{query}" if 1 <= page <= last else ""

        return cls(runs=elsewhere | here, number=number, newer=to(number - 1), older=to(number + 1))


def _chosen(paths: Mapping[str, Path], asked: Asked) -> dict[str, Path]:
    """As many as are drawn, or compared."""
    return {key: paths[key] for key in list(dict.fromkeys(asked.chosen))[:_DRAWN_RUNS] if key in paths}


def _window(asked: Asked) -> TimeRange | None:
    try:
        start, end = float(asked.query["from"]), float(asked.query["until"])
    except (KeyError, ValueError):
        return None
    least = MOST_BINS * SHORTEST_BIN_S / 60 / 4
    return TimeRange(start=max(0.0, start), end=max(start + least, end)) if 0 <= start < 1e7 and end < 1e7 else None  # noqa: PLR2004 - minutes


def _moves(shown: TimeRange) -> list[tuple[str, str, str]]:
    """(key, what it does, address) of each move."""
    width, middle = shown.end - shown.start, (shown.start + shown.end) / 2

    def to(start: float, end: float) -> str:
        start = max(0.0, start)
        return f"?from={start:.4f}&until={max(start, end):.4f}"

    return [
        ("+", "closer", to(middle - width / 4, middle + width / 4)),
        ("-", "farther", to(middle - width, middle + width)),
        ("ArrowLeft", "earlier", to(shown.start - width / 2, shown.start - width / 2 + width)),
        ("ArrowRight", "later", to(shown.start + width / 2, shown.end + width / 2)),
        ("0", "all", "?"),
    ]


def _step(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None  # noqa: PLR2004 - digits


def _place(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) <= 19 for part in parts):  # noqa: PLR2004 - of a place; digits
        return None
    return int(parts[0]), int(parts[1])


def _missing(left_out: int) -> str:
    return f"; {left_out} groups are not in the archive" if left_out else ""
