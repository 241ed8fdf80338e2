"""`streamrl report RUN`: one self-contained page about a run, also while it runs."""

import argparse
from pathlib import Path

from streamrl import keys
from streamrl.errors import EXIT_DONE
from streamrl_cli.reporting.data import read_run
from streamrl_cli.reporting.page import render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `streamrl report`."""
    parser.add_argument("run", type=Path, help="the run folder")


def run(args: argparse.Namespace) -> int:
    """Write the report and say where it is."""
    print(write_report(args.run))
    return EXIT_DONE


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run folder; returns its path.

    Raises:
        UserError: the folder is not a run, or has nothing to show yet.
    """
    from plotly.offline import get_plotlyjs

    page = render(read_run(run_dir), plotly_js=get_plotlyjs())
    path = run_dir / keys.FILE_REPORT
    path.write_text(page, encoding="utf-8")
    return path
