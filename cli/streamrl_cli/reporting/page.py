"""Binds the charts of a run into one self-contained HTML page. Pure."""

import json
from collections.abc import Mapping
from html import escape

from streamrl_cli.reporting.charts import COLOURS, Figure, all_charts, timeline
from streamrl_cli.reporting.data import PARTS, RunData, Timeline, weighted_bubbles
from streamrl_cli.runner.progress import bubble_shares, format_count, format_number, format_seconds

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;background:#f4f6f8;margin:0}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:19px;margin:34px 0 8px}h3{font-size:15px;margin:0}
p{margin:2px 0 8px;color:#52606d;font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:20px 0}
.card,.chart{background:#fff;border:1px solid #e1e6eb;border-radius:8px;padding:12px 16px}
.card b{display:block;font-size:22px;font-weight:600}.card span{color:#52606d;font-size:13px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(500px,1fr));gap:14px}
table{border-collapse:collapse;background:#fff;border:1px solid #e1e6eb;border-radius:8px;width:100%}
td,th{padding:6px 12px;text-align:right;border-bottom:1px solid #eef1f4;font-variant-numeric:tabular-nums}
td:first-child,th:first-child{text-align:left}
.text td,.text th{text-align:left}
.key i{display:inline-block;width:11px;height:11px;margin:0 5px 0 14px;border-radius:2px}
"""


WHY_NO_SCORE = {
    "raised": "the reward or the environment raised",
    "timeout": "it took longer than timeoutSeconds",
    "died": "its process ended",
    "bad_value": "what it gave cannot be used: a reward must be a finite number",
    "memory": "it ran out of memory",
}
WHY_DROPPED = {
    "reward_failed": "fewer than two samples of the group have a reward",
    "generation_failed": "a generator could not make a sample",
    "zero_variance": "all rewards of the group are equal: nothing to learn, another group was drawn",
    "too_stale": "older than maxStalenessSteps allows",
    "run_ended": "the run ended first",
}


def render(run: RunData, *, plotly_js: str) -> str:
    """The page as HTML text."""
    figures: list[Figure] = []
    charts = "".join(_chart(title, text, figure, into=figures) for title, text, figure in all_charts(run))
    timelines = "".join(_timeline(line, into=figures) for line in run.timelines)
    name = escape(run.folder.job.metadata.name)
    job = escape(json.dumps(run.folder.job.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name} - StreamRL</title><style>{STYLE}</style></head>'
        f"<body><main><h1>{name}</h1><p>{escape(run.folder.name)}</p>{_cards(run)}"
        f'<h2>Learning</h2><div class="grid">{charts}</div>{_sizes(run)}{_lost(run)}'
        f"<h2>Bubbles</h2><p>Where each process's wall time went.{_key()}</p>{_table(run)}{timelines}"
        f"<h2>Job</h2><details><summary>the resolved RLJob</summary><pre>{job}</pre></details></main>"
        f"<script>{plotly_js}</script><script>{_script(figures)}</script></body></html>"
    )


def _cards(run: RunData) -> str:
    evaluations, steps = run.evaluations, run.steps
    elapsed_s = steps[-1]["elapsed_s"] if steps else None
    held_out = (
        " → ".join(format_number(e["mean_reward"], digits=2) for e in (evaluations[0], evaluations[-1]))
        if evaluations
        else "–"
    )
    tokens = sum(line["tokens"] for line in steps)
    cards = {
        "held-out reward": held_out,
        "steps": f"{len(steps)} / {run.folder.job.spec.pipeline.steps}",
        "time of training": format_seconds(elapsed_s),
        "tokens trained": format_count(tokens),
        "tokens/s": format_count(tokens / elapsed_s if elapsed_s else None),
        "ended": str(run.result["status"]) if run.result else "not yet",
    }
    return (
        '<div class="cards">'
        + "".join(f'<div class="card"><span>{k}</span><b>{escape(v)}</b></div>' for k, v in cards.items())
        + "</div>"
    )


def _chart(title: str, text: str, figure: Figure, *, into: list[Figure]) -> str:
    into.append(figure)
    return f'<div class="chart"><h3>{escape(title)}</h3><p>{escape(text)}</p><div id="f{len(into) - 1}"></div></div>'


def _timeline(line: Timeline, *, into: list[Figure]) -> str:
    into.append(timeline(line))
    return f'<div class="chart" style="margin-top:12px"><h3>{escape(line.process)}</h3><div id="f{len(into) - 1}"></div></div>'


def _key() -> str:
    return (
        '<span class="key">'
        + "".join(f'<i style="background:{COLOURS[part]}"></i>{part}' for part in PARTS)
        + "</span>"
    )


def _table(run: RunData) -> str:
    rows = []
    for line in run.timelines:
        shares = bubble_shares(line.totals_s, wall_s=line.wall_s)
        causes = {
            cause.removeprefix("pipeline_"): s
            for cause, s in line.totals_s.items()
            if cause.startswith("pipeline_") and s > 0
        }
        main = max(causes, key=lambda cause: causes[cause]) if causes else "–"
        cells = "".join(f"<td>{shares[part]:.1%}</td>" for part in PARTS)
        rows.append(
            f"<tr><td>{escape(line.process)}</td><td>{format_seconds(line.wall_s)}</td>{cells}<td>{escape(main)}</td></tr>"
        )
    ratios = weighted_bubbles(run)
    cells = "".join(f"<td>{ratios[part]:.1%}</td>" for part in PARTS)
    rows.append(f"<tr><td>all, weighted by costPerHour</td><td></td>{cells}<td></td></tr>")
    head = "".join(f"<th>{part}</th>" for part in PARTS)
    return f"<table><tr><th>process</th><th>wall</th>{head}<th>pipeline, main cause</th></tr>{''.join(rows)}</table>"


def _sizes(run: RunData) -> str:
    """Every change of a pool's size with its reason."""
    if not run.scaling:
        return ""
    start_s = run.scaling[0]["time_s"]
    rows = "".join(
        f"<tr><td>{escape(line['pool'])}</td><td>{format_seconds(line['time_s'] - start_s)}</td>"
        f"<td>{line['from']} → {line['to']}</td><td>{escape(line['reason'])}</td></tr>"
        for line in run.scaling
    )
    head = "<tr><th>pool</th><th>after</th><th>generators</th><th>reason</th></tr>"
    return (
        f"<details><summary>Sizes of the generator pools, with reasons</summary><table>{head}{rows}</table></details>"
    )


def _lost(run: RunData) -> str:
    """Scores that failed by kind and groups that were dropped by reason, with their meaning."""
    title = "<h2>Failed scores and dropped groups</h2>"
    rows = [("scores failed", WHY_NO_SCORE, key, count) for key, count in _largest_first(run.score_failures)]
    rows += [("groups dropped", WHY_DROPPED, key, count) for key, count in _largest_first(run.dropped)]
    if not rows:
        return f"{title}<p>None.</p>"
    cells = "".join(
        f"<tr><td>{what}</td><td>{escape(key)}</td><td>{count}</td><td>{escape(meaning.get(key, ''))}</td></tr>"
        for what, meaning, key, count in rows
    )
    text = "<p>Over the whole run; held-out answers count too. A sample whose score failed is left out of the loss.</p>"
    head = "<tr><th></th><th>why</th><th>count</th><th>meaning</th></tr>"
    return f'{title}{text}<table class="text">{head}{cells}</table>'


def _largest_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _script(figures: list[Figure]) -> str:
    data = json.dumps(figures, separators=(",", ":")).replace("</", "<\\/")
    return f"const F={data};F.forEach((f,i)=>Plotly.newPlot('f'+i,f.data,f.layout,{{displayModeBar:false,responsive:true}}));"
