"""`streamrl report RUN`: one self-contained page about a run, also while it runs."""

import argparse
from pathlib import Path

from streamrl import keys
from streamrl.errors import EXIT_DONE
from streamrl.files import replace_file
from streamrl_cli import console
from streamrl_cli.reporting.data import RunData, read_run, weighted_bubbles
from streamrl_cli.reporting.page import PLOTLY_JS, asset, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl report`."""
    parser.add_argument("run", type=Path, help="the run folder")


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    console.out(str(write_report(read_run(args.run))))
    return EXIT_DONE


def write_report(data: RunData) -> Path:
    """Write `report.html` into the run folder; returns its path. Raises `UserError` if it cannot be written."""
    path = data.folder.file(keys.FILE_REPORT)
    replace_file(path, render(data, plotly_js=asset(PLOTLY_JS)).encode())
    return path


def bubbles_line(data: RunData) -> str:
    """The two numbers that tell how well a run went, and the rest of the wall."""
    ratios = weighted_bubbles(data)
    return "  ".join(f"{part} {ratios[part]:.0%}" for part in ("busy", "pipeline", "skew", "weights", "other"))
