"""`streamrl simulate SCENARIO.yaml`: a run in virtual time, with the scheduler's and the autoscaler's own decisions."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from streamrl.errors import EXIT_DONE, UserError
from streamrl_cli import console

_MAX_SEED = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="YAML 1.2")
    parser.add_argument("--seed", type=int, metavar="N", help="instead of the scenario's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a Chrome trace (ui.perfetto.dev reads it)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write charts as one HTML page")


def run(args: argparse.Namespace) -> int:
    """Simulate and show."""
    from streamrl_cli.reporting.chrome_trace import ChromeTrace
    from streamrl_cli.simulation.output import lines
    from streamrl_cli.simulation.reading import read_rows, read_scenario
    from streamrl_cli.simulation.results import summary
    from streamrl_cli.simulation.world import simulate

    scenario = read_scenario(args.scenario)
    if args.seed is not None:
        if not 0 <= args.seed <= _MAX_SEED:
            raise UserError(field="--seed", rule=f"must be from 0 to {_MAX_SEED}", got=args.seed)
        scenario = scenario.model_copy(update={"seed": args.seed})
    file = scenario.lengths.file
    rows = None if file is None else read_rows(args.scenario.resolve().parent / file.path)
    trace = None if args.trace is None else ChromeTrace()
    begun_s = time.perf_counter()
    outcome = simulate(scenario, rows=rows, trace=trace)
    took_s = time.perf_counter() - begun_s
    found = summary(outcome)
    console.out(*lines(found))
    pace = f"{found['sample_events'] / took_s:,.0f} sample events/s, {found['events'] / took_s:,.0f} heap events/s"
    console.out(f"simulated in {took_s:.3g} s: {pace}")
    if trace is not None:
        trace.write(args.trace)
    _write_files(args, found)
    return EXIT_DONE


def _write_files(args: argparse.Namespace, found: dict[str, Any]) -> None:
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        from streamrl_cli.reporting.page import PLOTLY_JS, asset
        from streamrl_cli.simulation.output import render

        page = render(found, title=args.scenario.stem, plotly_js=asset(PLOTLY_JS))
        args.plot.write_text(page, encoding="utf-8")
