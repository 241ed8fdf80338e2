"""`streamrl report RUN`: one self-contained page about a run, also while it runs."""

import argparse
from pathlib import Path

from streamrl import keys
from streamrl.errors import EXIT_DONE
from streamrl.files import check_output, replace_file
from streamrl_cli import console
from streamrl_cli.reporting.data import RunData, read_run, weighted_bubbles
from streamrl_cli.reporting.page import PLOTLY_JS, asset, render
from streamrl_cli.runner.folder import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl report`."""
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a Chrome trace too (ui.perfetto.dev reads it)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    data = read_run(args.run)
    if data.lost_lines:
        console.err(data.lost_lines)
    console.out(str(write_report(data)))
    if args.trace is not None:
        _write_trace(data.folder, args.trace)
    return EXIT_DONE


def write_report(data: RunData) -> Path:
    """Write `report.html` into the run folder; returns its path. Raises `UserError` if it cannot be written."""
    path = data.folder.file(keys.FILE_REPORT)
    replace_file(path, render(data, plotly_js=asset(PLOTLY_JS)).encode())
    return path


def _write_trace(folder: RunFolder, path: Path) -> None:
    from streamrl_cli.reporting.run_trace import run_trace

    check_output(path, field="--trace")
    found = run_trace(folder)
    found.trace.write(path)
    console.out(str(path))
    if found.left_out:
        console.err(f"the trace has {found.samples} samples; {found.left_out} older ones are left out")


def bubbles_line(data: RunData) -> str:
    """The two numbers that tell how well a run went, and the rest of the wall."""
    ratios = weighted_bubbles(data)
    return "  ".join(f"{part} {ratios[part]:.0%}" for part in ("busy", "pipeline", "skew", "weights", "other"))
