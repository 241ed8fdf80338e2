"""`python benchmarks/paper.py`: runs everything, prints the tables, writes them into docs/reference/paper-tables.md and draws the plots."""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from paper import fit, measured, resources, svg, tables
from paper.calibration import calibrate
from paper.facts import CROSS, ELASTIC, LENGTHS, MODELS, THROUGHPUT
from paper.holdout import Cell, calibration_cells, generation_cells, held_out, our_cells, setting, throughput_cells
from paper.rule import QWEN, RULE, Knobs, instance_gpus
from paper.runs import split

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "paper-tables.md"
PLOTS = ROOT / "docs" / "images" / "paper"
INTRODUCTION = """<!-- Written by `python benchmarks/paper.py --write`. Do not edit. -->
# The paper's tables in numbers

[What they mean](../benchmarks/paper-tables.md). The error stands behind ours; the band is of half and twice the slots.
"""
BAND = {"half of the slots": Knobs(slots=0.5), "twice the slots": Knobs(slots=2.0)}
"""Each is calibrated anew; Fig. 8 and 9 are run."""


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="benchmarks/paper.py", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="hold-out alone, without band")
    parser.add_argument("--no-band", action="store_true", help="without the band: a third of the runs")
    parser.add_argument("--write", action="store_true", help="write the page of the tables and its plots")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="take earlier runs from there and keep new ones")
    args = parser.parse_args()
    if args.resume is not None:
        measured.resume(args.resume)
    begun_s = time.process_time()
    lines, plots = [], {}
    sections = [_calibration(), _holdout(band=not (args.quick or args.no_band))]
    for section in sections if args.quick else [*sections, _fits(), _resources()]:
        for name, text in section:
            if name.endswith(".svg"):
                plots[name] = text
                continue
            print(text, flush=True)
            if name != SCREEN:
                lines.append(text)
    took_s = time.process_time() - begun_s
    lines.append(
        f"\nThe last call: {measured.RESULTS.runs} simulations, {took_s:.0f} s of processor time; seed 0 where no other is named."
    )
    print(lines[-1])
    if args.write:
        _write(lines, plots)


Section = Iterator[tuple[str, str]]
"""Name of a plot, `SCREEN`, or nothing; and the text."""
SCREEN = "screen"
"""What the page does not hold, as a plot of it says enough."""


def _calibration() -> Section:
    yield "", "## Calibration\n"
    yield (
        "",
        "| | GPUs of an instance | slots at 5K, 10K, 20K | scale s | GPU-ms a trained token | overhead |\n|---|---|---|---|---|---|",
    )
    for model in MODELS:
        found, gpus = calibrate(model), instance_gpus(QWEN[model])
        slots = ", ".join(str(setting(model, length, RULE).case(gpus).instance_slots) for length in LENGTHS)
        ms = 1e3 * found.train_gpu_s
        yield "", f"| {model} | {gpus} | {slots} | {found.scale:.2f} | {ms:.2f} | {found.overhead_s:.1f} s |"
    cells = list(calibration_cells())
    yield SCREEN, "\nResiduals of what was calibrated on:\n"
    yield from _lines(tables.cells(cells), name=SCREEN)


def _holdout(*, band: bool) -> Section:
    found = list(held_out())
    yield "", "\n## Hold-out\n"
    yield "", tables.errors(found, mean=tables.AIM_MEAN, most=tables.AIM_MOST) + "\n"
    yield from _lines(tables.by_table(found))
    yield "", ""
    yield from _lines(tables.cells(found, band=_band() if band else None))
    yield "", "\nGPUs by Algorithm 1:\n\n| | " + " | ".join(LENGTHS) + " |\n|---|" + "---|" * len(LENGTHS)
    for model in MODELS:
        sizes = [split(setting(model, length, RULE)) for length in LENGTHS]
        yield "", f"| {model} | " + " | ".join(f"{one.generator_devices}/{one.trainer_devices}" for one in sizes) + " |"
    yield "", "\n## The defaults of this project in the same model\n"
    yield (
        "",
        "Late binding, and batches that overlap, beside the paper's StreamRL-Async. The percentage is not an error.\n",
    )
    yield from _lines(tables.cells(our_cells()))
    yield from _throughput_plots(found, name="holdout")
    names = [cell.name for cell in found if cell.table == "Fig. 9"]
    yield "holdout-fig9.svg", _pair("Generation time at 20K by random dispatch", names, found, table="Fig. 9")


def _band() -> tables.Band:
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    for knobs in BAND.values():
        for cell in [*throughput_cells(knobs), *generation_cells(knobs)]:
            values[cell.table, cell.name].append(cell.ours)
    return values


def _fits() -> Section:
    found = list(fit.cells())
    yield "", "\n## Fit\n"
    yield "", tables.errors(found, mean=tables.FIT_MEAN, most=tables.FIT_MOST) + "\n"
    yield (
        "",
        "| | scale | GPU-ms a trained token | fixed part of a step | overhead of colocation | slots at 20K | GPUs | lengths |\n"
        + "|---" * 8
        + "|",
    )
    for one in fit.FITS:
        factors = ", ".join(f"{factor:g}" for factor in one.factors)
        yield (
            "",
            f"| {one.model} | {one.scale:.3g} | {1e3 * one.train_gpu_s:.3g} | {one.step_s:g} s | {one.overhead_s:g} s | {one.slots} | "
            f"{one.gpus[0]}/{one.gpus[1]} | {factors} |",
        )
    yield "", ""
    yield from _lines(tables.cells(found), name=SCREEN)
    known = ", ".join(f"{model} {share:.3f}" for model, share in fit.oracles())
    yield (
        "",
        "\nEight free numbers a model for eleven of the paper's. `StreamRL` is Algorithm 2, Fig. 9's oracle is late binding; the oracle under "
        f"Algorithm 2, which is not in the errors: {known}.\n",
    )
    yield from _throughput_plots(found, name="fit")


def _resources() -> Section:
    yield "", "\n## Fig. 10: GPUs for which stage\n"
    yield "", "| | profile | Algorithm 1 | the paper's choice | generation | training | gain |\n" + "|---" * 7 + "|"
    for row in [*resources.from_the_papers_points(), *resources.from_the_rule()]:
        sizes, paper = (f"{x}/{y}" for x, y in (row.sizes, row.paper))
        yield (
            "",
            f"| {row.model} | {row.profile} | {sizes} | {paper} | {row.generation:.2f} | {row.training:.2f} | {row.gain:.2f}x |",
        )
    traces = resources.elastic_traces()
    trace = {gpus: sum(steps) / len(steps) for gpus, steps in traces.items()}
    yield "", f"\n## Fig. 11: the elastic trace, seeds {', '.join(map(str, resources.ELASTIC_SEEDS))}\n"
    yield "", "| | " + " | ".join(str(gpus) for gpus, _ in ELASTIC) + " |\n|---" + "|---" * len(ELASTIC) + "|"
    rows = {
        "the paper, iteration": {gpus: str(step) for gpus, step in ELASTIC},
        "ours, steps done, mean": {gpus: f"{step:.1f}" for gpus, step in trace.items()},
        "ours, least to most": {gpus: f"{min(steps)} to {max(steps)}" for gpus, steps in traces.items()},
    }
    for name, row in rows.items():
        yield "", f"| {name} | " + " | ".join(row.get(gpus, "-") for gpus, _ in ELASTIC) + " |"
    series = {
        "paper": [(float(step), float(gpus)) for gpus, step in ELASTIC],
        "ours, mean": [(step, float(gpus)) for gpus, step in sorted(trace.items())],
    }
    yield "fig11.svg", svg.stairs("GPUs of generation", series, end=30.0, x_title="iteration")
    yield "", "\n## Fig. 12: what a simulation can say\n"
    for system, counts in resources.ages().items():
        whole = sum(counts.values())
        shares = ", ".join(f"{age}: {count / whole:.0%}" for age, count in counts.items())
        yield "", f"- {system}, 32B at 20K: age in steps of the groups trained on: {shares}"
    yield "", "\n## Table 3: two datacenters, and what the planner takes of them\n"
    yield (
        "",
        "| 7B | 32 H800, samples/s by cost | 32 H20 + 16 H800 | gain | the planner's | samples/s by cost | gain | the paper's gain |\n"
        + "|---" * 8
        + "|",
    )
    for row, paper in zip(resources.priced(), zip(*CROSS.values(), strict=True), strict=True):
        yield (
            "",
            f"| {row.length} | {row.single:.3g} | {row.papers_sizes:.3g} | {row.papers_sizes / row.single:.2f}x | {row.sizes[0]} H20 + {row.sizes[1]} H800 "
            f"| {row.planned:.3g} | {row.planned / row.single:.2f}x | {paper[0] / paper[1]:.2f}x |",
        )


def _lines(lines: Iterator[str], *, name: str = "") -> Section:
    return ((name, line) for line in lines)


def _throughput_plots(found: Sequence[Cell], *, name: str) -> Section:
    for system in THROUGHPUT:
        mine = [cell for cell in found if cell.table == system]
        if mine:
            names = [cell.name for cell in mine]
            yield f"{name}-{system.lower()}.svg", _pair(f"{system}, samples/s ({name})", names, mine, table=system)


def _pair(title: str, names: Sequence[str], found: Sequence[Cell], *, table: str) -> str:
    mine = [cell for cell in found if cell.table == table]
    return svg.bars(title, names, {"paper": [cell.paper for cell in mine], "ours": [cell.ours for cell in mine]})


def _write(lines: Sequence[str], plots: dict[str, str]) -> None:
    PLOTS.mkdir(parents=True, exist_ok=True)
    for name, text in plots.items():
        (PLOTS / name).write_text(text, encoding="utf-8")
    PAGE.write_text("\n".join([INTRODUCTION, *lines]) + "\n", encoding="utf-8")
